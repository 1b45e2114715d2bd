"""Changes a stream's layout: by UpdateShardCount, or by splits and merges one after the other."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from services.autoscaler.shards.figures import StreamDecision
from services.autoscaler.shards.layout import Layout
from services.core.backoff import Backoff
from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.resharding import Resharding

log = structlog.get_logger()

_T = TypeVar("_T")

PAUSE_S = 1.0
_TRIES = 5
"""Of one step, with pauses that double."""


async def nothing() -> None:
    """For a caller that does not wait for the acceptance."""


async def apply_layout(
    resharding: Resharding,
    topic: str,
    before: Layout,
    decision: StreamDecision,
    accepted: Callable[[], Awaitable[None]] = nothing,
) -> None:
    """Make the splits and merges from `before` to the decision's layout, each once; others' splits and merges stay.

    Splits come first, so capacity never falls below the present one. accepted: called once, when the service accepted
    the first change; later passing errors are retried. Raises BrokerError kinds; Unavailable, with nothing done, when
    the stream's layout is no longer `before`. After an error the finished steps stay.
    """
    wanted = decision.layout
    if wanted is None:
        return
    if (found := (await resharding.shards(topic)).layout) != before:
        raise Unavailable(
            f"{topic} was resharded meanwhile ({len(before)} shards, now {len(found)}). The change is decided anew"
        )
    if decision.at_once:
        try:
            await resharding.update_count(topic, len(wanted))
        except Throttled as error:
            # The ten updates of the day are used, perhaps by hand. Splits and merges have no such limit.
            log.warning("update_refused", stream=topic, error=str(error), hint="splits and merges are used instead")
        else:
            await accepted()
            await resharding.settled(topic)
            return
    todo = _Todo(before, wanted)
    if not await _step(resharding, topic, todo):
        return
    await accepted()
    for _ in range(2 * len(wanted) + len(before)):
        await resharding.settled(topic)
        if not await _retry_step(partial(_step, resharding, topic, todo)):
            return


async def _retry_step(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat a step a few times, with pauses: a step reads the layout first, so it can be repeated."""
    backoff = Backoff(PAUSE_S, 16 * PAUSE_S)
    for _ in range(_TRIES - 1):
        try:
            return await ask()
        except (Throttled, Unavailable) as error:
            log.info("step_repeated", error=str(error))
            backoff.fail()
            await backoff.wait()
    return await ask()


class _Todo:
    """splits: cuts to make. merges: cuts to remove, with the number of shards that may still begin there (one of
    several has the slot)."""

    def __init__(self, before: Layout, wanted: Layout) -> None:
        self.splits = [cut for cut in wanted if cut not in before]
        self.merges = {cut: int(cut in wanted) for cut in before if before.count(cut) > (cut in wanted)}

    def remove_done(self, layout: Layout) -> None:
        """A finished step is not repeated: if the layout differs from it later, another program changed it."""
        self.splits = [cut for cut in self.splits if cut not in layout]
        self.merges = {cut: kept for cut, kept in self.merges.items() if layout.count(cut) > kept}


async def _step(resharding: Resharding, topic: str, todo: _Todo) -> bool:
    """One split or merge. False: nothing is left to do."""
    shards = await resharding.shards(topic)
    todo.remove_done(shards.layout)
    numbers = dict(zip(shards.layout, shards.numbers, strict=True))
    if todo.splits:
        holder = max(first for first in numbers if first < todo.splits[0])
        await resharding.split(topic, numbers[holder], todo.splits[0])
        return True
    for at in range(1, len(shards.layout)):
        if shards.layout[at] in todo.merges:
            if todo.merges[shards.layout[at]] and shards.layout[at] != shards.layout[at - 1]:
                continue  # the first of several: its left neighbour has another slot
            await resharding.merge(topic, shards.numbers[at - 1], shards.numbers[at])
            return True
    return False
