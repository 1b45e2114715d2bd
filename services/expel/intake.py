"""What a lane makes of a polled batch: events that wait for their request, others' events, records that nobody can read."""

from collections.abc import Callable, Mapping, Sequence

from services.core.broker.record import Batch, TopicPartition, estimate_size
from services.core.broker.watermark import LowWater
from services.core.ledger.due import Span
from services.core.pipes import parked_topic, retry_topic
from services.expel.agenda import Agenda
from services.expel.body import Rendered, render_damaged
from services.expel.delivery import Chunk, Unreadable
from services.expel.elsewhere import Elsewhere
from services.expel.lane_bounds import LaneBounds, LaneShape
from services.expel.meter import LaneMeter
from services.expel.returned import Returned
from services.expel.sender import Sender


class Intake:
    """One lane's, during one membership. It renders, counts and files; nothing here waits or sends. Not thread-safe."""

    def __init__(
        self,
        shape: LaneShape,
        sender: Sender,
        meter: LaneMeter,
        low_water: LowWater,
        bounds: LaneBounds,
        agenda: Agenda,
        elsewhere: Elsewhere,
        clock: Callable[[], float],
    ) -> None:
        self._sender, self._meter, self._clock = sender, meter, clock
        self._low_water, self._bounds, self._agenda, self._elsewhere = low_water, bounds, agenda, elsewhere
        self._parked = parked_topic(shape.pipe)
        topics = (retry_topic(shape.pipe), self._parked)
        self._returned = {topic: Returned(topic, shape.pipe, shape.destination, shape.siblings) for topic in topics}

    def take(self, batch: Batch, inherited: Mapping[int, Span]) -> bool:
        """The batch is in flight from now on. False when all of it was inherited.

        inherited: what the retrier has already, by offset, and when it is due: settled, and passed over.
        """
        self._low_water.take(batch)
        rest = self._pass_over(batch, inherited) if inherited else batch
        if rest is None:
            return False
        if rest.damage is not None:
            self._admit(rest.source, rest, render_damaged(rest, rest.damage))
        elif rest.topic in self._returned:
            self._take_returned(rest)
        else:
            self._admit(rest.source, rest, self._sender.render(rest))
        return True

    def _pass_over(self, batch: Batch, inherited: Mapping[int, Span]) -> Batch | None:
        self._meter.inherited(len(inherited))
        # Whoever handed them over may have died before it told of it.
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            if (due := inherited.get(offset)) is not None:
                self._meter.ledger.add("retrying", [record], due)
        self._low_water.settle(batch.source, list(inherited))
        return batch.without(list(inherited))

    def _take_returned(self, batch: Batch) -> None:
        """What comes back, of which some is for other destinations."""
        found = self._returned[batch.topic].sort(batch)
        self._low_water.settle(batch.source, [*found.others, *found.twins])
        self._meter.twins(len(found.twins))
        self._meter.unclaimed(found.unclaimed, batch.topic)
        if batch.topic == self._parked:
            self._meter.replayed(sum(len(mine.records) for mine in found.mine))
        for mine in found.mine:
            self._admit(batch.source, mine, self._sender.render(mine))
        self._bury_unreadable(batch.source, found.unreadable)

    def _admit(self, source: TopicPartition, batch: Batch, found: Rendered) -> None:
        """Rendered events wait for their request from now on. source: where their offsets count."""
        now_ms = self._meter.now_ms()
        self._meter.took(batch.records, found.arrivals, now_ms)
        if found.parts:
            size = sum(map(len, found.parts))
            weight = size + estimate_size(found.records)
            self._bounds.add(len(found.parts), weight)
            lists = (found.offsets, found.records, found.parts, found.ids, found.arrivals)
            self._agenda.add(Chunk(source, *lists, now_ms, self._clock(), size, weight / len(found.parts)))
        self._bury_unreadable(source, found.unreadable)

    def _bury_unreadable(self, source: TopicPartition, unreadable: Sequence[Unreadable]) -> None:
        if unreadable:
            self._bounds.add(len(unreadable), self._elsewhere.bury_unreadable(source, unreadable))
