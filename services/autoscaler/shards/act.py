"""Carrying out a decision: UpdateShardCount, or splits and merges one after the other."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from services.autoscaler.shards.figures import StreamDecision
from services.autoscaler.shards.layout import Layout
from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.resharding import Resharding

log = structlog.get_logger()

_T = TypeVar("_T")

PAUSE_S = 1.0
_TRIES = 5
"""Of one step, with pauses that double."""


async def nothing() -> None:
    """For whom it is all the same when the service accepts."""


async def carry_out(
    resharding: Resharding,
    topic: str,
    before: Layout,
    decision: StreamDecision,
    accepted: Callable[[], Awaitable[None]] = nothing,
) -> None:
    """Make the splits and merges that lead from `before` to the decision's layout, each once. What anybody else splits or merges
    meanwhile stays. Splits come first, so capacity never falls below what there is.

    before: what the decision was made of. accepted: called once, when the service took the first change. From then on small
    failures are waited out. Raises BrokerError kinds; Unavailable, with nothing done, when the stream has another layout by
    now. What was done by then stays, and the next decision goes on from there.
    """
    wanted = decision.layout
    if wanted is None:
        return
    if (found := (await resharding.shards(topic)).layout) != before:
        raise Unavailable(
            f"{topic} was resharded meanwhile ({len(before)} shards, now {len(found)}): it is decided anew"
        )
    if decision.at_once:
        try:
            await resharding.update_count(topic, len(wanted))
        except Throttled as error:
            # Its ten a day are used up, by hand perhaps; splits and merges are not counted there.
            log.warning("update_refused", stream=topic, error=str(error), hint="it goes by splits and merges")
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
        if not await _patiently(partial(_step, resharding, topic, todo)):
            return


async def _patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Again after a pause, a few times: a step looks anew at what there is, so it can be made again."""
    for tried in range(_TRIES - 1):
        try:
            return await ask()
        except (Throttled, Unavailable) as error:
            log.info("step_repeated", error=str(error))
            await asyncio.sleep(PAUSE_S * 2**tried)
    return await ask()


class _Todo:
    """splits: cuts to make. merges: cuts to take away, by how many shards may still begin there (of several one has the slot)."""

    def __init__(self, before: Layout, wanted: Layout) -> None:
        self.splits = [cut for cut in wanted if cut not in before]
        self.merges = {cut: int(cut in wanted) for cut in before if before.count(cut) > (cut in wanted)}

    def note(self, layout: Layout) -> None:
        """What is there now is done for good: what becomes of it later is somebody else's doing."""
        self.splits = [cut for cut in self.splits if cut not in layout]
        self.merges = {cut: kept for cut, kept in self.merges.items() if layout.count(cut) > kept}


async def _step(resharding: Resharding, topic: str, todo: _Todo) -> bool:
    """One split or merge; False when nothing is left to do."""
    shards = await resharding.shards(topic)
    todo.note(shards.layout)
    numbers = dict(zip(shards.layout, shards.numbers, strict=True))
    if todo.splits:
        holder = max(first for first in numbers if first < todo.splits[0])
        await resharding.split(topic, numbers[holder], todo.splits[0])
        return True
    for at in range(1, len(shards.layout)):
        if shards.layout[at] in todo.merges:
            if todo.merges[shards.layout[at]] and shards.layout[at] != shards.layout[at - 1]:
                continue  # the first of several: its left neighbour is another slot's
            await resharding.merge(topic, shards.numbers[at - 1], shards.numbers[at])
            return True
    return False
