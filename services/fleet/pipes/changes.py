"""The effects of a pipe file on the events that the broker has: shown before anything starts.

The former fleet is known from the broker alone: its topics, the positions of its groups, and the bookmark with the lanes of the
last start (`services/core/undelivered/waiting.py`). Nothing is changed here.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from services.core.broker.contract import Broker
from services.core.broker.errors import UnknownTopic
from services.core.control.transform_marks import TransformMarks
from services.core.pipe_file.pipes import Destination, Pipe, PipeFile, own_streams
from services.core.pipe_file.references import former_lanes
from services.core.pipe_file.state_plan import StatePlan, text_digest
from services.core.pipe_file.topic_names import (
    dead_letter_topic,
    delivery_group,
    delivery_topics,
    lane_name,
    lanes_of,
    output_topic,
    removed_lanes,
    removed_pipes,
    renames_of,
)
from services.core.undelivered.waiting import Bookmark, find_takeover, read_bookmark
from services.core.units import format_count
from services.core.yaml_source import Problem
from services.fleet.dead.found import DeadLetterSearch, Filter
from services.fleet.pipes.check import python_files

_CONCURRENT = 16
"""Questions to the broker at once: a pipe may have a thousand destinations."""

Kind = Literal["new", "back", "renamed", "removed", "transform", "prefix", "retention", "silent"]


@dataclass(frozen=True, slots=True)
class Change:
    """One line for a person. name: the pipe, pipe/destination, stream, or `broker`; of kind silent: the broker.

    events: by topic; None: their number is not known. former: the pipe/destination at whose position it continues.
    """

    kind: Kind
    name: str
    text: str
    events: Mapping[str, int | None] = field(default_factory=dict)
    former: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"

    def as_json(self) -> dict[str, object]:
        return {"change": self.kind, "name": self.name, "text": self.text, "events": dict(self.events)}


@dataclass(frozen=True, slots=True)
class Changes:
    """lines: in the order of the file. abandoned: what each pipe leaves behind that the file neither has nor decides about.

    states: of each pipe whose transform has changed since it left state over several events: what that one kept.
    """

    lines: Sequence[Change]
    abandoned: Mapping[str, str]
    states: Mapping[str, StatePlan] = field(default_factory=dict)

    def problems(self, path: Path) -> list[Problem]:
        """One for each abandoned pipe. path: of the pipe file."""
        return [
            Problem(
                str(path),
                f"removed.{pipe}",
                f"{left}.\n"
                "  This file no longer has the pipe, and does not say what becomes of its dead letters and state.\n"
                "  Try: put the pipe back.\n"
                "  Or, if it is gone or has another name now, add these lines with your reason (beside `pipes`, or to `removed` "
                "if the file has it):\n"
                "    removed:\n"
                f"      {pipe}: {{drop: WHY}}\n"
                "  Then its dead letters and its transform's state stay where they are. Later, penstock dead redrive --pipe "
                f"{pipe}\n"
                "  with --to PIPE/DESTINATION or --to-stream sends its dead letters. Events that still wait for its destinations "
                "are dropped.\n"
                "  With {bury: WHY} instead of {drop: WHY} these events become dead letters.",
            )
            for pipe, left in self.abandoned.items()
        ]


async def find_changes(broker: Broker, pipes: PipeFile, path: Path, data: Path | None) -> Changes:
    """Compare the file, at this path, with the broker. data: the fleet's data folder, for the transforms' state.

    Raises BrokerError kinds.
    """
    topics = await broker.admin.topics()
    search = _Search(broker, pipes, await read_bookmark(broker.reader), topics)
    own = [name for name in own_streams(pipes) if name in topics]
    clocked = await broker.admin.kept_by_event_time(own)
    lines = [Change("retention", name, _BY_EVENT_TIME) for name in own if name in clocked]
    plans = await _read_plans(broker, pipes)
    for name, pipe in pipes.pipes.items():
        lines += await search.compare_pipe(name, pipe)
        if name not in plans:
            lines += await asyncio.to_thread(_compare_transform, name, pipe, data)
    lines += await search.gone_lanes()
    digests = await asyncio.to_thread(digest_texts, pipes, path, plans)
    states = {name: plan for name, plan in plans.items() if digests[name] != plan.text}
    return Changes(lines, await search.abandoned(data), states)


async def _read_plans(broker: Broker, pipes: PipeFile) -> dict[str, StatePlan]:
    """By pipe: what its transform has left in its checkpoint. Nothing from before there were plans in marks."""
    marks = TransformMarks(broker.reader)
    with suppress(UnknownTopic):
        await marks.refresh()
    found = {name: marks.of(name) for name, pipe in pipes.pipes.items() if pipe.transform is not None}
    return {name: mark.plan for name, mark in found.items() if mark and mark.has_begun and mark.plan}


def digest_texts(pipes: PipeFile, path: Path, names: Collection[str]) -> dict[str, str]:
    """`text_digest` of the transform of each of these pipes. Blocking."""
    files, found = python_files(path, pipes), {}
    for name in names:
        pipe = pipes.pipes[name]
        assert pipe.transform is not None
        code = files[name].read_text(encoding="utf-8") if name in files else ""
        columns = {stream: pipes.streams[stream].columns for stream in pipe.sources}
        tables = {table: pipes.tables[table].columns for table in pipe.transform.tables}
        found[name] = text_digest(pipe.transform, columns, code, tables)
    return found


_BY_EVENT_TIME = (
    "Kafka counts its retention from the clients' clocks (message.timestamp.type is CreateTime). So ingest refuses events "
    "older than half the retention (too-old). Try, once all services are of 0.2: penstock apply --log-append-time, and "
    "restart ingest (docs/upgrading.md)"
)


class _Search:
    def __init__(self, broker: Broker, pipes: PipeFile, before: Bookmark, topics: Collection[str]) -> None:
        self._broker, self._pipes, self._before, self._topics = broker, pipes, before, topics
        self._limit = asyncio.Semaphore(_CONCURRENT)
        self._heirs = {lane: choice.deliver_to for lane, choice in removed_lanes(pipes).items() if choice.deliver_to}
        lanes, decided = lanes_of(pipes), removed_lanes(pipes).keys() | before.left.keys()
        self._gone = sorted(lane for lane in before.lanes - lanes - decided if not self._is_decided(lane.split("/")[0]))

    def _is_decided(self, pipe: str) -> bool:
        return pipe in removed_pipes(self._pipes) or pipe in self._before.left

    async def compare_pipe(self, name: str, pipe: Pipe) -> list[Change]:
        """The changes of its transform and its destinations."""
        if pipe.transform is not None and output_topic(name) not in self._topics:
            stored = await self._count_stored([topic for topic in pipe.sources if topic in self._topics])
            if not stored:
                return []
            text = f"new transform, will read {_count(stored)} from the beginning; its destinations receive the results"
            lanes = [lane_name(name, each.name) for each in pipe.destinations]
            if any([await self._has_begun(lane, topic) for lane in lanes for topic in stored]):
                text += ", also of events that they have received without it"
            return [Change("transform", name, text, stored)]
        found = await asyncio.gather(*(self._compare_lane(name, pipe, each) for each in pipe.destinations))
        unknown = await self._list_unknown_names(name, pipe)
        return [*(change for change in found if change is not None), *unknown]

    async def _list_unknown_names(self, name: str, pipe: Pipe) -> list[Change]:
        """Each `renamed_from` that is no name of a former pipe or destination here. None on a broker without a former fleet."""
        known = self._before.lanes | self._before.left.keys()
        if not known:
            return []
        lines = []
        topics = [topic for topic in delivery_topics(name, pipe) if topic in self._topics]
        pipes = {lane.partition("/")[0] for lane in known}
        for one in pipe.destinations:
            formers = former_lanes(name, pipe.renamed_from, one.name, one.renamed_from)
            begun = [old for old in formers for topic in topics if await self._has_begun(old, topic)]
            pipes |= {lane.partition("/")[0] for lane in begun}
            olds = [old for old in formers if old.endswith(f"/{one.renamed_from}")]
            if one.renamed_from is not None and known.isdisjoint(olds) and not set(begun) & set(olds):
                gone = {old.partition("/")[2] for old in self._gone if old.startswith(f"{name}/")}
                lines.append(_unknown_name(lane_name(name, one.name), one.renamed_from, "destination", gone))
        if pipe.renamed_from is not None and pipe.renamed_from not in pipes:
            lines.append(_unknown_name(name, pipe.renamed_from, "pipe", pipes - self._pipes.pipes.keys()))
        return lines

    async def _compare_lane(self, name: str, pipe: Pipe, destination: Destination) -> Change | None:
        lane = lane_name(name, destination.name)
        former = [old for old, heir in self._heirs.items() if heir == lane and self._before.left.get(old) != lane]
        topics = [topic for topic in delivery_topics(name, pipe) if topic in self._topics]
        unbegun = [topic for topic in topics if not await self._has_begun(lane, topic)]
        async with self._limit:
            found = await find_takeover(self._broker.admin, former, lane, topics, self._before.left)
        if found is not None:
            return await self._compare_renamed(lane, *found, topics)
        was_gone = lane in self._before.left or (self._before.lanes and lane not in self._before.lanes)
        if was_gone and not unbegun and not former:
            unread = {topic: count for topic, count in (await self._count_unread(lane, topics)).items() if count}
            remedy = f"penstock group skip {lane} --to-end --reason WHY before the start, for new ones only"
            text = f"is back, continues where it ended and will receive {_count(unread)}. Try: {remedy}"
            if heir := self._gone_heir(lane, name):
                text += f"; or `renamed_from: {heir}`, if it is {heir} under its former name"
            return Change("back", lane, text, unread) if unread and not await self._is_running(lane) else None
        stored = await self._count_stored(unbegun)
        if not stored:
            return None
        is_new = len(unbegun) == len(topics) and not await self._has_run(lane)
        what = "new destination" if is_new else f"begins to read {' and '.join(stored)}"
        if destination.start == "latest":
            return Change(
                "new", lane, f"{what}, new events only (start: latest); {_count(stored)} are not sent", stored
            )
        remedy = "`start: latest` for new ones only"
        if same := [old.split("/")[1] for old in self._gone if old.startswith(f"{name}/")]:
            remedy += f"; or `renamed_from: {same[0]}`, if it is {same[0]} under a new name"
        elif moved := [old.split("/")[0] for old in self._gone if old.endswith(f"/{destination.name}")]:
            remedy += f"; or `renamed_from: {moved[0]}` at the pipe, if it is {moved[0]} under a new name"
        return Change("new", lane, f"{what}, will receive {_count(stored)} from the beginning. Try: {remedy}", stored)

    async def _compare_renamed(self, lane: str, old: str, is_taken_over: bool, topics: Sequence[str]) -> Change:
        if is_taken_over:
            inherited = [topic for topic in topics if await self._has_begun(old, topic)]
            unread = await self._count_unread(old, inherited)
            text = f"continues at the position of {old} ({_count(unread)} unread)"
            if heir := self._gone_heir(old, lane.partition("/")[0]):
                text += (
                    f", which got the name {heir} since. Try: `renamed_from: {heir}`, if it is {heir} under a new name"
                )
            if await self._is_running(old):
                text += (
                    f". {old} runs. `penstock apply` copies its position at once. Events that {old} delivers after that are "
                    "delivered again. Try: stop the fleet; then penstock up, which needs no penstock apply before"
                )
            return Change("renamed", lane, text, unread, old)
        unread = {topic: count for topic, count in (await self._count_unread(lane, topics)).items() if count}
        text = f"has begun before and keeps its own position{f' ({_count(unread)} unread)' if unread else ''}; it does not "
        text += f"take over the position of {old}"
        if behind := await self._list_behind(old, lane, topics):
            offsets = " ".join(f"--to-offset {topic}:{partition}:{at}" for topic, partition, at in behind)
            text += f", which is further back. The events in between were not delivered to {old}. Try: penstock group reset "
            text += f"{lane} {offsets} before the start, if this one is to get them"
        return Change("renamed", lane, text, unread)

    def _gone_heir(self, lane: str, pipe: str) -> str:
        """The destination of this pipe that had taken over from the lane and that the file no longer names; else ""."""
        heir = self._before.left.get(lane, "")
        is_named = heir in lanes_of(self._pipes) or heir in removed_lanes(self._pipes)
        return heir.partition("/")[2] if heir.startswith(f"{pipe}/") and not is_named else ""

    async def _list_behind(self, old: str, lane: str, topics: Sequence[str]) -> list[tuple[str, int, int]]:
        """Topic, partition and next offset of the old lane, where this is before the next offset of the other one."""
        behind = []
        for topic in topics:
            theirs, own = [await self._broker.admin.positions(_group_of(each), topic) for each in (old, lane)]
            starts = {
                partition: stored.start for partition, stored in (await self._broker.reader.describe(topic)).items()
            }
            for partition, position in sorted(theirs.items()):
                at = max(position, starts.get(partition, position))
                if partition in own and at < own[partition]:
                    behind.append((topic, partition, at))
        return behind

    async def gone_lanes(self) -> list[Change]:
        """Destinations of the last start that the file no longer has, with open dead letters, in pipes that it has. So are former
        names of theirs, which this file does not name."""
        lanes, named = lanes_of(self._pipes), removed_lanes(self._pipes).keys()
        ended = self._before.lanes - lanes
        former = {old for old, heir in self._before.left.items() if heir in ended} - lanes - named
        found = []
        for lane in sorted({*self._gone, *former}):
            pipe, _, destination = lane.partition("/")
            if pipe not in self._pipes.pipes or dead_letter_topic(pipe) not in self._topics:
                continue
            letters = await self._count_letters(Filter(pipe=pipe, destination=destination))
            if letters:
                command = f"penstock dead redrive --pipe {pipe} --destination {destination} --to PIPE/DESTINATION"
                text = f"removed, with {format_count(letters, 'dead letter')}. Try: {command}, or penstock dead discard"
                found.append(Change("removed", lane, text, {dead_letter_topic(pipe): letters}))
        return found

    async def abandoned(self, data: Path | None) -> dict[str, str]:
        """The dead letters and the transform's state of each pipe of the last start that is gone, in words."""
        pipes = {lane.partition("/")[0] for lane in self._before.lanes}
        renamed = {old.partition("/")[0] for old in renames_of(self._pipes)}
        found = {}
        for pipe in sorted(pipes - self._pipes.pipes.keys() - renamed):
            if self._is_decided(pipe) or dead_letter_topic(pipe) not in self._topics:
                continue
            letters = await self._count_letters(Filter(pipe=pipe))
            state = await asyncio.to_thread(_state_of, pipe, data)
            words = [f"the pipe {pipe} has {format_count(letters, 'open dead letter')}"] if letters else []
            words += [f"its transform has state over several events in {state[0]}"] if state else []
            if words:
                found[pipe] = ", ".join(words)
        return found

    async def _has_begun(self, lane: str, topic: str) -> bool:
        async with self._limit:
            return await self._broker.admin.has_begun(_group_of(lane), topic)

    async def _has_run(self, lane: str) -> bool:
        """Whether a former fleet had the lane, and the lane has begun a stream, or a topic of its pipe. `penstock apply` alone
        begins nothing."""
        if lane not in self._before.lanes:
            return False
        own = [topic for topic in self._topics if topic.startswith(f"{lane.partition('/')[0]}.")]
        streams = [topic for topic in self._topics if "." not in topic]  # only the name of a stream has no dot
        for topic in [*own, *streams]:
            if await self._has_begun(lane, topic):
                return True
        return False

    async def _is_running(self, lane: str) -> bool:
        """Whether the destination has members: it came back, or was added, in a roll-out that did not record it."""
        async with self._limit:
            return bool(await self._broker.admin.members(_group_of(lane)))

    async def _count_stored(self, topics: Collection[str]) -> dict[str, int | None]:
        """The stored events by topic, without empty topics; None where offsets do not count them."""
        found: dict[str, int | None] = {}
        for topic in topics:
            stored = [one for one in (await self._broker.reader.describe(topic)).values() if one.start < one.end]
            if stored:
                counts = self._broker.is_contiguous(topic)
                found[topic] = sum(one.end - one.start for one in stored) if counts else None
        return found

    async def _count_unread(self, lane: str, topics: Collection[str]) -> dict[str, int | None]:
        group = _group_of(lane)
        lags = {topic: await self._broker.admin.group_lag(group, topic) for topic in topics}
        return {topic: sum(lag.records for lag in found.values()) for topic, found in lags.items()}

    async def _count_letters(self, where: Filter) -> int:
        return await (await DeadLetterSearch.open(self._broker, where)).count()


class _Identity(msgspec.Struct, frozen=True):
    """Some fields of a checkpoint's `penstock.json`, which the transform service writes (`spark/jobs/checkpoint.py`)."""

    transform: str
    ran: bool = False
    state: str = ""


def _state_of(pipe: str, data: Path | None) -> tuple[Path, _Identity] | None:
    """The checkpoint of a transform that left state over several events, in the data folder. None: none is known. Blocking."""
    if data is None:
        return None
    folder = data / "checkpoints" / pipe
    try:
        found = msgspec.json.decode((folder / "penstock.json").read_bytes(), type=_Identity)
    except (OSError, msgspec.DecodeError):
        return None
    return (folder, found) if found.ran and found.state else None


def _compare_transform(name: str, pipe: Pipe, data: Path | None) -> list[Change]:
    state = None if pipe.transform is None else _state_of(name, data)
    if pipe.transform is None or state is None:
        return []
    text = pipe.transform.sql or pipe.transform.python or ""
    if hashlib.sha256(text.encode()).hexdigest() == state[1].transform:
        return []
    words = (
        f"changed transform; the former one left state over several events (open windows, joins) in {state[0]}, and its version "
        "did not record which transform it belongs to. So only the transform service can compare, at its start: it goes on "
        "with that state, or it refuses to start and leaves the state as it is. After a refusal, try: the former transform, "
        f"which goes on; this one in a pipe of another name, which reads its sources from their start, with `removed: {{{name}: "
        f"{{drop: WHY}}}}` for this name; or penstock group reset {name} --to-earliest, which gives that state up. In the last "
        "two cases all results come again, and receivers drop results whose ids they know: give new results other ids"
    )
    return [Change("transform", name, words)]


def _unknown_name(name: str, former: str, what: str, gone: Collection[str]) -> Change:
    text = f"renamed_from: {former}: no {what} had this name here, so it takes over nothing"
    return Change("renamed", name, text + (f". Try: {', or '.join(sorted(gone))}" if gone else ""))


def _group_of(lane: str) -> str:
    return delivery_group(*lane.split("/"))


def _count(events: Mapping[str, int | None]) -> str:
    """As in "2,800 events of orders"."""
    words = [
        f"all events of {topic}" if count is None else f"{format_count(count, 'event')} of {topic}"
        for topic, count in events.items()
    ]
    return " and ".join(words)
