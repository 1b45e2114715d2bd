"""Provisioning from the command line: a broker that is just starting gets some time. What waits for destinations that a pipe
file no longer has is found before anything is changed, and refused unless the file says what becomes of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, UnsafeTopic
from services.core.broker.producer import Producer
from services.core.pipes import CONTROL, PipeFile, Removed, lanes_of
from services.core.provision import PartitionsDiffer, Provisioned, ensure_topics
from services.core.waiting import Waiting, find_waiting, hand_over_positions, read_bookmark, write_bookmark
from services.core.yaml_source import BadConfiguration, Problem
from services.fleet.problem import CommandFailed

PATIENCE_S = 30.0
LOOK_WITHIN_S = 60.0

Result = TypeVar("Result")


class Prepared(NamedTuple):
    """The topics are there, and `waiting` is what waited before. went_on: new names by the old ones whose positions they took."""

    topics: Provisioned
    waiting: Waiting
    went_on: Mapping[str, str]


async def provision(broker: str, pipes: PipeFile, *, grow: bool = False) -> Provisioned:
    """Create what the pipe file implies; retries for up to 30 s while the broker is away. Raises CommandFailed."""
    return await _patiently(broker, lambda opened: ensure_topics(opened.admin, pipes, grow=grow))


async def prepare(broker: str, pipes: PipeFile, path: Path, *, grow: bool = False) -> Prepared:
    """As `provision`, once it is certain that nothing waits for nobody. path: of the pipe file.

    Raises BadConfiguration otherwise, with nothing changed, and CommandFailed.
    """

    async def work(opened: Broker) -> Prepared:
        before = await read_bookmark(opened.admin)
        waiting = await find_waiting(opened.admin, lanes_of(pipes), before)
        if problems := name_unclaimed(waiting, pipes, path):
            raise BadConfiguration(problems)
        topics = await ensure_topics(opened.admin, pipes, grow=grow)
        went_on = {old: new for new, old in (await hand_over_positions(opened.admin, pipes)).items()}
        if waiting.bookmark != before and CONTROL in await opened.admin.topics():
            async with Producer(opened.driver) as producer:
                await write_bookmark(producer, waiting.bookmark, time.time_ns() // 1_000_000)
        return Prepared(topics, waiting, went_on)

    return await _patiently(broker, work)


async def look(broker: str, pipes: PipeFile) -> Waiting | str:
    """What waits now, changing nothing; or why it cannot be said. Within LOOK_WITHIN_S."""
    try:
        async with asyncio.timeout(LOOK_WITHIN_S), open_broker(broker) as opened:
            return await find_waiting(opened.admin, lanes_of(pipes), await read_bookmark(opened.admin))
    except TimeoutError:
        return f"{broker} did not tell within {LOOK_WITHIN_S:.0f} s"
    except (BadBrokerUrl, BrokerError) as error:
        return f"{broker}: {error}"


def name_unclaimed(waiting: Waiting, pipes: PipeFile, path: Path) -> list[Problem]:
    """One problem for each destination that the file no longer has, for which events wait, and of which it says nothing."""
    return [
        Problem(
            str(path),
            f"removed.{lane}",
            f"{_count(places)} for {lane}, which this file no longer has; nobody would ever get them. Try: put it back, or "
            f"say what becomes of them: removed: {{{lane}: {{deliver_to: PIPE/DESTINATION}}}}, or {{bury: WHY}} (dead letters), "
            "or {drop: WHY}",
        )
        for lane, places in waiting.unclaimed.items()
        if lane not in pipes.removed
    ]


def describe_removed(waiting: Waiting, pipes: PipeFile, went_on: Mapping[str, str] | None = None) -> list[str]:
    """One line for each destination of `removed`, and each partition that could not be read."""
    lines = [
        f"{_count(waiting.unclaimed[lane])} for {lane}: {_choice(choice)}"
        if lane in waiting.unclaimed
        else f"nothing waits for {lane} any more. Try: take it out of `removed`"
        for lane, choice in pipes.removed.items()
    ]
    unread = [
        f"{topic}[{partition}] could not be read to its end: {why}"
        for (topic, partition), why in waiting.unread.items()
    ]
    return lines + unread + [f"{new} goes on in its streams where {old} ended" for old, new in (went_on or {}).items()]


def _choice(choice: Removed) -> str:
    if choice.deliver_to is not None:
        return f"delivered to {choice.deliver_to}"
    return "buried as dead letters" if choice.bury is not None else "dropped"


def _count(places: Mapping[str, int]) -> str:
    total = sum(places.values())
    where = ", ".join(f"{count} in {topic}" for topic, count in places.items())
    return f"{total} {'event waits' if total == 1 else 'events wait'} ({where})"


async def _patiently(broker: str, work: Callable[[Broker], Awaitable[Result]]) -> Result:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with open_broker(broker) as opened:
                return await work(opened)
        except BadBrokerUrl as error:
            raise CommandFailed(str(error), status=2) from error
        except PartitionsDiffer as error:
            raise CommandFailed(str(error)) from error
        except UnsafeTopic as error:
            raise CommandFailed(str(error), status=2) from error
        except BrokerError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise CommandFailed(
                    f"the topics could not be created on {broker}: {error}", "whether the broker runs and answers"
                ) from error
        await asyncio.sleep(0.5)
