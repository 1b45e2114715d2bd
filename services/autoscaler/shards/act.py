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
    resharding: Resharding, topic: str, decision: StreamDecision, accepted: Callable[[], Awaitable[None]] = nothing
) -> None:
    """Until the stream has the layout. Splits come first, so capacity never falls below what there is.

    accepted: called once, when the service took the first change. From then on small failures are waited out.
    Raises BrokerError kinds. What was done by then stays, and the next decision goes on from there.
    """
    wanted = decision.layout
    if wanted is None:
        return
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
    if not await _step(resharding, topic, wanted):
        return
    await accepted()
    for _ in range(2 * len(wanted) + len((await _patiently(partial(resharding.shards, topic))).layout)):
        await resharding.settled(topic)
        if not await _patiently(partial(_step, resharding, topic, wanted)):
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


async def _step(resharding: Resharding, topic: str, wanted: Layout) -> bool:
    """One split or merge; False when nothing is left to do."""
    shards = await resharding.shards(topic)
    numbers = dict(zip(shards.layout, shards.numbers, strict=True))
    missing = [cut for cut in wanted if cut not in numbers]
    if missing:
        holder = max(first for first in numbers if first < missing[0])
        await resharding.split(topic, numbers[holder], missing[0])
        return True
    for at in range(1, len(shards.layout)):
        if shards.layout[at] not in wanted or shards.layout[at] == shards.layout[at - 1]:
            await resharding.merge(topic, shards.numbers[at - 1], shards.numbers[at])
            return True
    return False
