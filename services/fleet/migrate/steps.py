"""The steps of a migration: begin, copy and compare, hold the writers, hand over, move the groups. Each may be repeated."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from services.core import homes as timing
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import BrokerError, NotAllowed, TopicExists, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.several.broker import SeveralBrokers
from services.core.homes import Home, Homes, State
from services.core.pipes import PipeFile
from services.core.yaml_source import BadConfiguration
from services.fleet.migrate.copying import GIVE_UP, CopyDiffers, StreamCopy
from services.fleet.migrate.movable import LoadPipes
from services.fleet.migrate.positions import GroupPositions
from services.fleet.problem import CommandFailed

_MARGIN_S = 0.2
"""Beside the lease: clocks of two processes run a little differently."""
NEARLY_S, MOST_S = 0.4, 1.2
"""A pass over what is new that is shorter than NEARLY_S ends the copying: the writers are held for another pass, beside the
lease. On brokers that are far away no pass may be so short. So after each longer pass the limit grows by a tenth, up to MOST_S,
which is together with the lease still less than HOLD_S."""
_AGAIN_S = 0.2
_PATIENCE_S = 60.0
_MOST_TURNS = 20
"""At the hand-over, each of a second or more."""
FILE_S = 3.0
"""The time for which a pipe file may be unusable during a move: somebody may be saving it."""

Show = Callable[[str, int, int], None]
"""Called with the step, and the number of events that are done, of how many."""


class Result(NamedTuple):
    """events, origins: compared. missing: origins that the copy lacked. held_s: for how long writers were held. groups: moved.
    late: events that came to the former topic after the stream was handed over, and were stored in the stream."""

    home: Home
    events: int = 0
    origins: int = 0
    missing: int = 0
    held_s: float = 0.0
    groups: int = 0
    late: int = 0

    def as_json(self, stream: str) -> dict[str, Any]:
        home = self.home
        return {
            "stream": stream,
            "home": home.readers,
            "state": home.state or "settled",
            "to": home.to or None,
            "former": home.former or None,
            "events": self.events,
            "origins": self.origins,
            "missing": self.missing,
            "held_s": round(self.held_s, 3),
            "groups": self.groups,
            "late": self.late,
        }


class Migration:
    """The migration of one stream. load: as `LoadPipes`; a copy may take hours, and the pipe file may change in this time. by:
    the user. show: the progress. before: called before each step and behind each record, for tests."""

    def __init__(
        self,
        fleet: SeveralBrokers,
        homes: Homes,
        load: LoadPipes,
        stream: str,
        by: str,
        show: Show = lambda _step, _done, _of: None,
        before: Callable[[str], None] = lambda _step: None,
    ) -> None:
        self._fleet, self._homes, self._load = fleet, homes, load
        self._stream, self._by, self._show, self._before = stream, by, show, before
        self._positions = GroupPositions(stream, self._newest_pipes, self._named)
        self._copy: StreamCopy | None = None
        self._copy_of = ""
        self._held_s = 0.0
        self._groups = self._late = self._turns = 0
        self._stored: dict[tuple[str, int], int] = {}
        """By incarnation of a former topic and partition: the next offset of its late events."""

    @property
    def home(self) -> Home:
        """The state now, as far as it was read."""
        return self._homes.home(self._stream)

    def result(self) -> Result:
        if self._copy is None:
            return Result(self.home, groups=self._groups, late=self._late)
        counts = self._copy.origins.counts()
        return Result(self.home, self._copy.events, *counts, self._held_s, self._groups, self._late)

    async def run(self, to: str) -> Result:
        """Until the stream lives on broker `to`; goes on where an earlier run ended. Raises CommandFailed, BrokerError kinds."""
        await self._patiently(self._homes.refresh)
        if self.home.state is not None and self.home.to != to:
            raise CommandFailed(
                f"{self._stream} is being moved to {self.home.to}",
                f"penstock migrate {self._stream} --to {self.home.to}, or first --undo",
            )
        if self.home.state is None:
            await self._patiently(partial(self._begin, to))
        while self.home.state is not None:
            if self.home.to != to:
                raise self._moved_meanwhile()
            await self._patiently(self._step)
        return self.result()

    async def _step(self) -> None:
        await self._homes.refresh()
        match self.home.state:
            case "copying":
                await self._follow()
                await self._positions.check(self.home)
                await self._record("held")
            case "held":
                await self._hand_over()
            case "written":
                await self._move_groups()
        await self._homes.refresh()

    async def _patiently(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step that may be repeated, while a broker is not available. The time begins at the first failure, and anew
        when the copy has grown."""
        progress, deadline = -1, 0.0
        while True:
            try:
                await step()
            except BrokerError as error:
                if self._progress > progress:
                    progress, deadline = self._progress, time.monotonic() + _PATIENCE_S
                if not error.retriable or isinstance(error, NotAllowed) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    @property
    def _progress(self) -> int:
        return 0 if self._copy is None else self._copy.progress

    async def _record(self, state: State, **more: Any) -> bool:
        self._before(state)
        counts = await self._homes.record(self._stream, state, by=self._by, **more)
        self._before(f"after {state}")
        return counts

    async def _begin(self, to: str) -> None:
        """Make the topic there, empty, and write down where its offsets begin."""
        await self._homes.refresh()
        home, self._copy = self.home, None
        if home.state is not None or home.readers == to:
            return
        if home.former not in ("", to):
            raise CommandFailed(
                f"{self._stream} was moved from {home.former}, and its former topic is still there",
                f"penstock migrate {self._stream} --finish, which deletes it, or --to {home.former}, which moves it back",
            )
        source, target = await self._named(home.readers), await self._named(to)
        self._show("creates the topic", 0, 1)
        partitions = (await source.admin.topics()).get(self._stream)
        if partitions is None:
            raise CommandFailed(f"{home.readers} has no topic {self._stream}", "penstock apply")
        there = await self._incarnation(target)
        if there is not None and there == await self._incarnation(source):
            raise CommandFailed(
                f"{to} and {home.readers} are the same broker: both have the same topic {self._stream}",
                "another URL for one of them, or another ?prefix=, under `brokers:` in the pipe file",
            )
        self._before("create")
        if home.former == to:  # its end is not certain: an append whose writer was frozen may have arrived later
            await self._store_late(home, target, there)
            await self._delete_topic(home, target, there)
        elif home.undone == to:
            await self._delete_topic(home, target, home.copy)
        retention = (await self._load_pipes(to)).streams[self._stream].retention
        spec = TopicSpec(self._stream, partitions, retention_ms=int(retention * 1000))
        try:
            await target.admin.create_topic(spec)
        except TopicExists:
            await self._check_empty(target, to, partitions)
        await target.admin.create_own_topics()
        stored = await source.reader.describe(self._stream)
        known = home.bases.get(home.readers, {})
        bases = {partition: held.start + known.get(partition, 0) for partition, held in stored.items()}
        await self._record("copying", to=to, bases=bases, copy=await target.admin.incarnation(self._stream))
        await self._homes.refresh()

    async def _check_empty(self, target: Broker, to: str, partitions: int) -> None:
        """The topic that is there was made by a killed command, or by somebody. Raises CommandFailed, UnsafeTopic."""
        there = await target.reader.describe(self._stream)
        if (
            len(there) != partitions
            or any(held.end for held in there.values())
            or await target.admin.compacted([self._stream])
        ):
            raise CommandFailed(
                f"broker {to} has a topic {self._stream} already: with events, compacted, or with another number of partitions",
                "the owner of that topic; or another ?prefix= for this broker in the pipe file",
            )
        await target.admin.check_durability([self._stream])

    async def _incarnation(self, broker: Broker) -> str | None:
        try:
            return await broker.admin.incarnation(self._stream)
        except UnknownTopic:
            return None

    async def _named(self, name: str) -> Broker:
        return await self._fleet.brokers.named(name)

    async def _newest_pipes(self) -> PipeFile:
        """Do as `_load_pipes` does, for the present migration. After the hand-over the stream must move, so its kind is no longer
        checked."""
        return await self._load_pipes(self.home.to if self.home.state == "copying" else None)

    async def _load_pipes(self, to: str | None) -> PipeFile:
        """The present pipe file. Raises CommandFailed when for longer than FILE_S the file is invalid, or forbids the move to
        `to`. Then no step was done, and the same command goes on."""
        deadline = time.monotonic() + FILE_S
        while True:
            try:
                return await asyncio.to_thread(self._load, to)
            except (BadConfiguration, CommandFailed) as error:
                if time.monotonic() > deadline:
                    text = f"the pipe file has changed, and {self._stream} cannot be moved with this file: {error}"
                    if self.home.state == "written":
                        text += f". Until the move is finished, no event of {self._stream} is delivered"
                    remedy = error.remedy if isinstance(error, CommandFailed) else "penstock check"
                    raise CommandFailed(text, f"{remedy}; then the same command, which goes on", status=2) from error
            await asyncio.sleep(_AGAIN_S)

    async def _stream_copy(self) -> StreamCopy:
        """That of the migration which is under way: somebody else may have given one up and begun the next."""
        home = self.home
        if self._copy is None or self._copy_of != home.copy:
            self._copy_of = home.copy
            source, target = await self._named(home.readers), await self._named(home.to)
            bases = home.bases
            self._copy = StreamCopy(self._stream, source, target, bases.get(home.readers, {}), bases.get(home.to, {}))
        return self._copy

    async def _follow(self) -> None:
        """Copy and compare, until little is left to do."""
        copy = await self._stream_copy()
        limit = NEARLY_S
        while True:
            began = time.monotonic()
            self._before("copy")
            ends = await copy.ends()
            await copy.advance()
            await copy.compare()
            self._show("copies and compares", copy.events, sum(ends.values()) - sum(self._bases().values()))
            if time.monotonic() - began < limit:
                return
            limit = min(1.1 * limit, MOST_S)

    def _bases(self) -> Mapping[int, int]:
        return self.home.bases.get(self.home.to, {})

    async def _hand_over(self) -> None:
        """The writers are held, or are continuing by themselves. Copy the rest, compare it, and give the stream to its new home.

        Nothing that was acknowledged ends after the lease, and `written` is void when a writer went on.
        """
        began = time.monotonic()
        copy = await self._stream_copy()
        try:
            await asyncio.sleep(timing.LEASE_S + _MARGIN_S)
            self._show("holds the writers", copy.events, copy.events)
            self._before("drain")
            await copy.advance()
            ends = await copy.ends()
            copied = await copy.copied()
            if ends != copied:  # a late append: the next turn finds it, or that the writers went on
                self._turns += any(copied[one] > end for one, end in ends.items())
                if self._turns > _MOST_TURNS:
                    raise CopyDiffers(f"{self._stream}: the copy has more events than the stream", GIVE_UP)
                return
            await copy.compare()
            if copy.origins.counts()[1]:
                raise CopyDiffers(f"{self._stream}: the copy lacks events", f"penstock migrate {self._stream} --undo")
            await self._record("written", ends=ends)
        except CopyDiffers:
            await self._record("released")
            raise
        finally:
            self._held_s = max(self._held_s, time.monotonic() - began)

    async def _move_groups(self) -> None:
        """When all readers have left: the position of each group, in the copy."""
        home = self.home
        self._show("waits until the readers have left", 0, 1)
        await asyncio.sleep(timing.LEASE_S + _MARGIN_S)
        await self._positions.wait_until_left(home)
        await self._require(home)
        self._before("groups")
        self._groups = await self._positions.move(home)
        await self._record("moved")

    async def undo(self) -> Result:
        """Give up a migration that has not handed over yet, and delete the copy. May be repeated."""
        await self._homes.refresh()
        home = self.home
        if home.state is None and home.undone:
            await self._delete_topic(home, await self._named(home.undone), home.copy)
            return self.result()
        if home.state is None and not home.former:
            raise CommandFailed(f"{self._stream} is not being moved", f"penstock migrate {self._stream} --status")
        if home.state is None:
            raise CommandFailed(
                f"{self._stream} has moved to {home.readers}",
                f"penstock migrate {self._stream} --to {home.former}, which moves it back",
            )
        if home.state == "written":
            raise CommandFailed(
                f"{self._stream} is stored on {home.to} already, and its readers wait",
                f"penstock migrate {self._stream} --to {home.to}, which completes the move; "
                f"then --to {home.readers}, which moves it back",
            )
        if home.state == "held":
            await self._record("released")
        if await self._record("undone"):
            await self._homes.refresh()
            await self._delete_topic(self.home, await self._named(home.to), self.home.copy)
        return self.result()

    async def finish(self) -> Result:
        """Delete the former topic. The move cannot be undone afterwards."""
        await self._homes.refresh()
        home = self.home
        if home.state is not None or not home.former:
            text = f"is being moved to {home.to}" if home.state is not None else "has no former topic"
            raise CommandFailed(f"{self._stream} {text}: there is nothing to finish", "--status")
        former = await self._named(home.former)
        incarnation = await self._incarnation(former)
        await self._store_late(home, former, incarnation)
        await self._delete_topic(home, former, incarnation)
        await self._patiently(partial(self._record_finished, home))
        return self.result()

    async def _record_finished(self, home: Home) -> None:
        """May be repeated. Raises as `_require`."""
        await self._homes.refresh()
        if self.home.state is None and not self.home.former:
            return  # an earlier attempt without an answer has done it
        await self._require(home)
        await self._record("finished")

    async def _store_late(self, home: Home, former: Broker, incarnation: str | None) -> None:
        """Send what was written to the former topic after the stream was handed over to the stream. May be repeated.

        Nobody has answered for these events: their writers were frozen, and have repeated them. Or a writer does not follow the
        homes, because it runs with a pipe file without `brokers`. So they are stored, maybe twice. Raises as `_require`.
        """
        if incarnation is None:
            return
        stored = await former.reader.describe(self._stream)
        async with Producer(self._fleet.appender) as producer:
            for partition, held in stored.items():
                base = home.bases.get(home.former, {}).get(partition, 0)
                beginning = home.ends.get(partition, held.end + base) - base
                offset = max(held.start, self._stored.get((incarnation, partition), beginning))
                while offset < held.end:
                    await self._require(home)
                    batch = await former.reader.read(self._stream, partition, offset, max_records=500)
                    if batch is None:
                        break
                    (await producer.send_to(self._stream, {partition: batch.records})).raise_first()
                    offset = self._stored[incarnation, partition] = batch.offsets[-1] + 1
                    self._late += len(batch.records)

    async def _require(self, home: Home) -> None:
        """Raises CommandFailed when somebody has moved the stream meanwhile: this command may have been frozen for hours."""
        await self._homes.refresh()
        if self.home.epoch != home.epoch:
            raise self._moved_meanwhile()

    def _moved_meanwhile(self) -> CommandFailed:
        return CommandFailed(
            f"somebody else has moved {self._stream} meanwhile, so this command has ended",
            f"penstock migrate {self._stream} --status",
        )

    async def _delete_topic(self, home: Home, broker: Broker, incarnation: str | None) -> None:
        """Delete this one, and no other of its name, and never the stream itself. Raises as `_require`."""
        live = {await self._incarnation(await self._named(name)) for name in (home.readers, home.writers)}
        await self._require(home)
        if incarnation and incarnation not in live and await self._incarnation(broker) == incarnation:
            with suppress(UnknownTopic):
                await broker.admin.delete_topic(self._stream)
