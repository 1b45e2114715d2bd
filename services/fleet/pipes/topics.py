"""Provisions the topics of a pipe file. Waits for a broker that is starting.

First it finds events that wait for destinations which the pipe file no longer has. It changes nothing unless the file says
under `removed` how to continue.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from services.core.audit import GROW, Entry
from services.core.broker.connect import BadBrokerUrl, prefix_of
from services.core.broker.contract import Broker
from services.core.broker.errors import AccessRefused, BrokerError, GroupHasMembers, UnsafeTopic
from services.core.broker.producer import Producer
from services.core.control.pauses import carry_pauses
from services.core.fleet_broker import open_fleet_broker
from services.core.pipe_file.pipes import PipeFile, Removed, own_streams
from services.core.pipe_file.snapshot import read_broker
from services.core.pipe_file.topic_names import (
    CONTROL,
    claims_of,
    delivery_topics,
    lanes_of,
    removed_lanes,
    removed_pipes,
    renames_of,
)
from services.core.provision import (
    LargerTopic,
    NoSuchTopics,
    Others,
    Provisioned,
    Recorder,
    TooFewPartitions,
    check_compaction,
    ensure_topics,
    find_larger,
    find_others,
)
from services.core.times import format_time
from services.core.undelivered.waiting import (
    WaitingEvents,
    find_waiting,
    hand_over_positions,
    read_bookmark,
    write_bookmark,
)
from services.core.yaml_source import BadConfiguration, Problem
from services.fleet.dead.audit import read_audit, whoami
from services.fleet.folder import SNAPSHOT
from services.fleet.pipes.changes import Change, Changes, find_changes
from services.fleet.pipes.state_check import check_states
from services.fleet.problem import CommandFailed

PATIENCE_S = 30.0
CHECK_WITHIN_S = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GrownTopic:
    """A topic that has more partitions than the pipe file asks for. entry: the audit's, about its present number; None: none."""

    topic: LargerTopic
    entry: Entry | None

    def __str__(self) -> str:
        name, has, wanted = self.topic.name, self.topic.partitions, self.topic.wanted
        text = f"{name} has {has} partitions; the pipe file asks for at least {wanted}"
        if self.entry is None:
            return f"{text}. The audit does not say who added them"
        before = self.entry.filters.get("from", "?")
        return f"{text}. {self.entry.who} grew it from {before} at {format_time(self.entry.at)}"

    def as_json(self) -> dict[str, object]:
        entry = self.entry
        by, at = (None, None) if entry is None else (entry.who, format_time(entry.at))
        topic = self.topic
        return {
            "topic": topic.name,
            "partitions": topic.partitions,
            "wanted": topic.wanted,
            "grown_by": by,
            "grown_at": at,
            "text": str(self),
        }


async def _find_grown(broker: Broker, pipes: PipeFile) -> list[GrownTopic]:
    """In the order of the pipe file. Raises BrokerError kinds."""
    larger = find_larger(await broker.admin.topics(), pipes)
    if not larger:
        return []
    entries = {
        (entry.topic, entry.filters.get("to")): entry
        async for entry in read_audit(broker.reader)
        if entry.action == GROW
    }
    return [GrownTopic(one, entries.get((one.name, str(one.partitions)))) for one in larger]


class PreparedTopics(NamedTuple):
    """The topics exist. waiting: the events that waited before."""

    topics: Provisioned
    waiting: WaitingEvents
    grown: Sequence[GrownTopic]


async def provision(broker: str, pipes: PipeFile) -> Provisioned:
    """Create the topics of the pipe file. Retries for up to 30 s while the broker is unreachable. Raises CommandFailed."""
    return await _patiently(broker, pipes, lambda opened: _ensure(opened, pipes))


async def _ensure(broker: Broker, pipes: PipeFile, *, grow: bool = False) -> Provisioned:
    async with Producer(broker.appender) as producer:
        recorder = Recorder(broker, producer, await asyncio.to_thread(whoami))
        return await ensure_topics(broker.admin, pipes, grow=grow, recorder=recorder)


async def prepare(broker: str, pipes: PipeFile, path: Path, *, grow: bool = False) -> PreparedTopics:
    """As `provision`, after checking that no event waits for a destination without an owner. path: of the pipe file.

    Raises BadConfiguration when the check fails (nothing is changed then), and CommandFailed.
    """

    async def work(opened: Broker) -> PreparedTopics:
        before = await read_bookmark(opened.reader)
        waiting = await find_waiting(opened, lanes_of(pipes), before)
        if problems := name_unclaimed(waiting, pipes, path):
            raise BadConfiguration(problems)
        topics = await _ensure(opened, pipes, grow=grow)
        await hand_over_positions(opened.admin, pipes, before.left)
        left = {name: choice.deliver_to or "" for name, choice in (pipes.removed | removed_lanes(pipes)).items()}
        left |= {
            lane: ""
            for lane in waiting.undelivered
            if lane.partition("/")[0] in removed_pipes(pipes) and lane not in left
        }
        bookmark = replace(waiting.bookmark, left={**waiting.bookmark.left, **left})
        if bookmark != before and CONTROL in await opened.admin.topics():
            async with Producer(opened.appender) as producer:
                await carry_pauses(opened.reader, producer, renames_of(pipes))
                await write_bookmark(producer, bookmark, time.time_ns() // 1_000_000)
        return PreparedTopics(topics, waiting, await _find_grown(opened, pipes))

    return await _patiently(broker, pipes, work)


async def count_from_storing(broker: str, pipes: PipeFile) -> list[str]:
    """Let the retention of streams count from storing. Gives those that were altered. Raises CommandFailed."""

    async def work(opened: Broker) -> list[str]:
        found = sorted(await opened.admin.kept_by_event_time(own_streams(pipes)))
        await opened.admin.keep_by_storing(found)
        return found

    return await _patiently(broker, pipes, work)


class Checked(NamedTuple):
    """The result of `check_broker`."""

    waiting: WaitingEvents
    changes: Changes
    grown: Sequence[GrownTopic]


async def check_broker(broker: str, pipes: PipeFile, path: Path, data: Path | None) -> Checked | str:
    """The waiting events, the changes and the grown topics, or the reason why they are not known. Changes nothing. Takes up to
    CHECK_WITHIN_S. Raises BadConfiguration when topics of others are not there, and for a stream that cannot be compacted, or is
    and should not be."""
    try:
        async with asyncio.timeout(CHECK_WITHIN_S), open_fleet_broker(broker, pipes) as opened:
            others = await find_others(opened.admin, pipes)
            if others.absent:
                raise BadConfiguration(
                    [Problem(str(path), f"topic {one}", str(NoSuchTopics([one]))) for one in others.absent.values()]
                )
            await check_compaction(opened.admin, pipes, await opened.admin.topics())
            waiting = await find_waiting(opened, lanes_of(pipes), await read_bookmark(opened.reader))
            changes = await find_changes(opened, pipes, path, data)
            lines = [*_tell_silent(others), *await asyncio.to_thread(compare_prefix, broker, data), *changes.lines]
            return Checked(waiting, replace(changes, lines=lines), await _find_grown(opened, pipes))
    except TimeoutError:
        return f"{broker} did not answer within {CHECK_WITHIN_S:.0f} s"
    except UnsafeTopic as error:
        problems = [Problem(str(path), f"streams.{name}.{key}", text) for name, key, text in error.problems]
        raise BadConfiguration(problems) from error
    except (BadBrokerUrl, BrokerError) as error:
        return f"{broker}: {error}"


def _tell_silent(others: Others) -> list[Change]:
    text = "it does not answer, so nothing is known about the topics there. Only the destinations there wait for it: {}"
    return [Change("silent", name, text.format(why)) for name, why in others.silent.items()]


async def check_changes(broker: str, pipes: PipeFile, path: Path, data: Path | None) -> Sequence[Change]:
    """The changes, before `prepare`. Retries as `provision` does. data: as in `find_changes`. path: of the pipe file.

    Raises BadConfiguration when a pipe is gone that the file says nothing about, or a transform cannot use the state that the
    former one left, and CommandFailed.
    """

    async def work(opened: Broker) -> tuple[Changes, list[Change]]:
        others = await find_others(opened.admin, pipes)
        return await find_changes(opened, pipes, path, data), _tell_silent(others)

    changes, silent = await _patiently(broker, pipes, work)
    if problems := changes.problems(path):
        raise BadConfiguration(problems)
    lines = [*silent, *await asyncio.to_thread(compare_prefix, broker, data), *changes.lines]
    return [*lines, *await asyncio.to_thread(check_states, path, changes.states, broker)]


def compare_prefix(broker: str, data: Path | None) -> list[Change]:
    """A line when the fleet on the data folder last ran with another prefix on a broker of this kind. Blocking."""
    former = None if data is None else read_broker(data / SNAPSHOT)
    if former is None or (former and urlsplit(former).scheme != urlsplit(broker).scheme):
        return []
    before, now = prefix_of(former), prefix_of(broker)
    if before == now:
        return []
    text = (
        f"the prefix was {before or 'empty'} at the last start on {data}, and is {now or 'empty'} now. The fleet begins anew: "
        "it sees none of its former topics, positions, pauses and waiting events. They stay on the broker. Try, to go on with "
        f"them: {f'?prefix={before} in the broker' if before else 'no ?prefix= in the broker'}'s URL"
    )
    return [Change("prefix", "broker", text)]


def name_unclaimed(waiting: WaitingEvents, pipes: PipeFile, path: Path) -> list[Problem]:
    """One problem for each destination with waiting events that the file says nothing about."""
    is_claimed = claims_of(pipes)
    return [
        Problem(
            str(path),
            f"removed.{lane}",
            f"{_describe(waiting, lane)}.\n"
            f"  This file no longer has {lane}. They would never be delivered.\n"
            f"  Try: put it back.\n"
            f"  Or, if it has another name now, add there: renamed_from: {lane.partition('/')[2]}\n"
            f"  Or decide about them: removed: {{{lane}: {{deliver_to: PIPE/DESTINATION}}}}\n"
            "  Instead of deliver_to: {bury: WHY} makes dead letters of them, {drop: WHY} drops them.\n"
            "  With bury and drop, its unread events stay in their stream.",
        )
        for lane in sorted(waiting.unclaimed.keys() | waiting.undelivered.keys())
        if not is_claimed(lane)
    ]


def describe_removed(waiting: WaitingEvents, pipes: PipeFile, changes: Sequence[Change]) -> list[str]:
    """One line for each destination or pipe of `removed`, each former name with events, each partition that could not be read.

    changes: those that are told, too. They have the unread events of a former name at whose position another one continues.
    """
    told = {change.former for change in changes}
    found = sorted(waiting.unclaimed.keys() | waiting.undelivered.keys())
    lines, decided = [], set[str]()
    for name, choice in (removed_lanes(pipes) | removed_pipes(pipes)).items():
        mine = [lane for lane in found if lane == name or (lane.startswith(f"{name}/") and lane not in decided)]
        decided.update(mine)
        for lane in mine:
            if lane in waiting.unclaimed:
                lines.append(f"{_describe_waiting(waiting, lane)}: {_choice(pipes, choice)}")
            for stream, text in _list_undelivered(waiting, lane):
                if lane not in told or not _is_read(pipes, stream, choice.deliver_to):
                    lines.append(f"{text}: {_unread(pipes, stream, choice)}")
        if not mine and name in pipes.removed:
            lines.append(f"nothing waits for {name} any more. Try: remove it from `removed`")
    return lines + [
        f"{topic}[{partition}] could not be read to its end: {why}"
        for (topic, partition), why in waiting.unread.items()
    ]


def _choice(pipes: PipeFile, choice: Removed) -> str:
    if choice.deliver_to is not None:
        pipe, _, name = choice.deliver_to.partition("/")
        webhook = next(one.webhook for one in pipes.pipes[pipe].destinations if one.name == name)
        is_keyed = webhook is not None and webhook.order == "key"
        return f"delivered to {choice.deliver_to}{', some after newer events of their keys' if is_keyed else ''}"
    return "written to the dead letters" if choice.bury is not None else "dropped"


def _unread(pipes: PipeFile, stream: str, choice: Removed) -> str:
    """The outcome of the events of this stream that the removed destination had not read."""
    if choice.deliver_to is None:
        return "they stay there"
    if _is_read(pipes, stream, choice.deliver_to):
        return f"{choice.deliver_to} reads {stream}"
    return f"they stay there; {choice.deliver_to} does not read it"


def _is_read(pipes: PipeFile, stream: str, lane: str | None) -> bool:
    pipe = (lane or "").partition("/")[0]
    return pipe in pipes.pipes and stream in delivery_topics(pipe, pipes.pipes[pipe])


def _describe(waiting: WaitingEvents, lane: str) -> str:
    found = [_describe_waiting(waiting, lane)] if lane in waiting.unclaimed else []
    return ", ".join([*found, *(text for _, text in _list_undelivered(waiting, lane))])


def _describe_waiting(waiting: WaitingEvents, lane: str) -> str:
    return f"{_count(waiting.unclaimed[lane])} for {lane}"


def _list_undelivered(waiting: WaitingEvents, lane: str) -> list[tuple[str, str]]:
    """Each stream, and its events in words."""
    return [
        (stream, f"{count} {'event' if count == 1 else 'events'} of {stream} not yet delivered to {lane}")
        for stream, count in waiting.undelivered.get(lane, {}).items()
    ]


def _count(places: Mapping[str, int]) -> str:
    total = sum(places.values())
    where = ", ".join(f"{count} in {topic}" for topic, count in places.items())
    return f"{total} {'event waits' if total == 1 else 'events wait'} ({where})"


async def _patiently(broker: str, pipes: PipeFile, work: Callable[[Broker], Awaitable[Result]]) -> Result:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with open_fleet_broker(broker, pipes) as opened:
                return await work(opened)
        except BadBrokerUrl as error:
            raise CommandFailed(str(error), status=2) from error
        except (TooFewPartitions, NoSuchTopics) as error:
            raise CommandFailed(str(error)) from error
        except UnsafeTopic as error:
            raise CommandFailed(str(error), status=2) from error
        except AccessRefused as error:  # to try again helps nobody, and sends a wrong password again
            raise CommandFailed(f"the topics could not be created on {broker}: {error}") from error
        except BrokerError as error:
            if not error.retriable or time.monotonic() > deadline:
                if isinstance(error, GroupHasMembers):
                    raise CommandFailed(
                        f"a destination cannot take over its position on {broker}: {error}",
                        "stop the instances of expel with the earlier pipe file, then the same command",
                    ) from error
                raise CommandFailed(
                    f"the topics could not be created on {broker}: {error}", "whether the broker runs and answers"
                ) from error
        await asyncio.sleep(0.5)
