"""Checks the names in a pipe file against each other: unknown streams, duplicates, loops, wrong former names, wrong entries of
`removed`."""

from collections.abc import Iterator, Mapping, Sequence

from services.core.broker.several.brokers import DEFAULT
from services.core.yaml_source import KeyPath

RESERVED = "penstock"
"""No pipe and no stream has this name: topics that begin with it belong to the fleet."""

_KINDS = {"log": "an embedded log", "kinesis": "Kinesis"}

Found = tuple[KeyPath, str]
"""The path of a key, and the mistake there, for a person."""


def find_broken_references(data: object) -> list[Found]:
    """Every mistake. data: a pipe file as plain data. Parts of the wrong shape are skipped: the model reports them."""
    streams = _mapping(_mapping(data).get("streams"))
    pipes = _mapping(_mapping(data).get("pipes"))
    tables = _mapping(_mapping(data).get("tables"))
    problems: list[Found] = [
        ((section, RESERVED), f"{RESERVED!r} is reserved for our own topics. Try: another name")
        for section, names in (("streams", streams), ("pipes", pipes))
        if RESERVED in names
    ]
    problems += _check_topics(streams)
    feeds: dict[str, set[str]] = {}
    problems += _check_brokers(_mapping(_mapping(data).get("brokers")), streams, pipes)
    problems += _check_places(pipes, streams)
    read = {place: name for name, stream in streams.items() if (place := _place(stream, "topic")) is not None}
    for name, pipe in pipes.items():
        sources = [source for source in _items(_mapping(pipe).get("sources")) if isinstance(source, str)]
        destinations = [_mapping(destination) for destination in _items(_mapping(pipe).get("destinations"))]
        problems += [(("pipes", name, *path), text) for path, text in _check_pipe(sources, destinations, streams)]
        if _mapping(pipe).get("transform") is None:
            problems += [
                (("pipes", name, *path), text) for path, text in _check_deletes(sources, destinations, streams)
            ]
        transform = _mapping(_mapping(pipe).get("transform"))
        named = [table for table in _items(transform.get("tables")) if isinstance(table, str)]
        problems += [(("pipes", name, *path), text) for path, text in _check_tables(named, sources, tables)]
        outputs = _mapping(transform.get("outputs"))
        problems += [(("pipes", name, *path), text) for path, text in _check_outputs(outputs, destinations)]
        for index, destination in enumerate(destinations):
            kind = "stream" if "stream" in destination else "topic"
            place = _place(destination.get("topic"), "name")
            target = destination.get("stream") or (None if place is None else read.get(place))
            if isinstance(target, str) and _reaches(feeds, target, set(sources)):
                path = ("pipes", name, "destinations", index, kind)
                problems.append((path, f"{target!r} leads back to the pipe's own source: a loop"))
                continue
            for source in sources:
                feeds.setdefault(source, set()).add(str(target))
    return problems + list(_check_renames(pipes)) + _check_removed(_mapping(_mapping(data).get("removed")), pipes)


def _check_pipe(
    sources: Sequence[str],
    destinations: Sequence[Mapping[str, object]],
    streams: Mapping[str, object],
) -> Iterator[Found]:
    known = f"is not among streams: {', '.join(sorted(map(str, streams)))}"
    for index, source in enumerate(sources):
        if source not in streams:
            yield ("sources", index), f"{source!r} {known}"
        if source in sources[:index]:
            yield ("sources", index), f"{source!r} occurs twice"
    names: set[str] = set()
    for index, destination in enumerate(destinations):
        name, stream = destination.get("name"), destination.get("stream")
        if isinstance(name, str):
            if name in names:
                yield ("destinations", index, "name"), f"{name!r} occurs twice"
            names.add(name)
        if isinstance(stream, str) and stream not in streams:
            yield ("destinations", index, "stream"), f"{stream!r} {known}"
        elif isinstance(stream, str) and (topic := _mapping(streams[stream]).get("topic")):
            there = "" if _is_at_home(streams[stream]) else f", on: {_mapping(streams[stream]).get('on')}"
            text = (
                f"{stream!r} is the topic {topic} of others, which is only read. Try: topic: {{name: {topic}{there}}}"
            )
            yield ("destinations", index, "stream"), text


def _check_deletes(
    sources: Sequence[str], destinations: Sequence[Mapping[str, object]], streams: Mapping[str, object]
) -> Iterator[Found]:
    """A compacted stream that gets the events of its sources as they are, and deletes as events."""
    kept = [source for source in sources if _mapping(streams.get(source)).get("tombstones") == "deliver"]
    for index, destination in enumerate(destinations):
        name = destination.get("stream")
        if kept and isinstance(name, str) and _mapping(streams.get(name)).get("compact") is True:
            text = (
                f"{name!r} is compacted, but no key would be deleted there: with tombstones: deliver, {kept[0]!r} turns deletes "
                f"into events. Try: tombstones: skip in {kept[0]!r}. A compacted stream then gets the deletes as deletes"
            )
            yield ("destinations", index, "stream"), text


def _check_topics(streams: Mapping[str, object]) -> Iterator[Found]:
    """Topics of others that are read twice, or are ours."""
    readers: dict[tuple[str, str], str] = {}
    for name, stream in streams.items():
        place = _place(stream, "topic")
        if place is None:
            continue
        if place in readers:
            text = f"{place[1]!r} is the topic of stream {readers[place]!r} already. Try: that stream in several pipes"
            yield ("streams", name, "topic"), text
        readers.setdefault(place, name)


def _place(one: object, key: str) -> tuple[str, str] | None:
    """The broker and the name of a topic of others; None where there is none, or a part has the wrong shape. key: of the name."""
    topic, home = _mapping(one).get(key), _mapping(one).get("on")
    if not isinstance(topic, str) or not (home is None or isinstance(home, str)):
        return None
    return home or DEFAULT, topic


def _check_brokers(
    brokers: Mapping[str, object], streams: Mapping[str, object], pipes: Mapping[str, object]
) -> Iterator[Found]:
    """A broker with the name of the fleet's own; streams and topics on brokers that are not there, or cannot have them."""
    if DEFAULT in brokers:
        text = f"{DEFAULT!r} is the name of the fleet's own broker, that of --broker. Try: another name"
        yield ("brokers", DEFAULT), text
    known = ", ".join(map(str, (DEFAULT, *brokers)))
    places: list[tuple[KeyPath, object]] = [(("streams", name), stream) for name, stream in streams.items()]
    places += [
        (("pipes", name, "destinations", index, "topic"), _mapping(destination).get("topic"))
        for name, pipe in pipes.items()
        for index, destination in enumerate(_items(_mapping(pipe).get("destinations")))
    ]
    for path, one in places:
        home, found = _mapping(one).get("on"), _mapping(one)
        kind = str(brokers.get(str(home))).partition(":")[0]
        if isinstance(home, str) and home != DEFAULT and home not in brokers:
            yield (*path, "on"), f"{home!r} is not among brokers: {known}"
        elif kind == "kinesis" and found.get("compact") is True:
            text = f"{home} is Kinesis, which keeps no event for more than a year. Try: Kafka or the embedded log"
            yield (*path, "compact"), text
        elif kind in ("log", "kinesis") and (path[0] == "pipes" or "topic" in found):
            text = f"{home} is {_KINDS[kind]}, which has no topics of others: they are on Kafka only. Try: a Kafka among brokers"
            yield (*path, "on"), text


def _check_places(pipes: Mapping[str, object], streams: Mapping[str, object]) -> Iterator[Found]:
    """Transforms that read on another broker than the one they write to."""
    for name, pipe in pipes.items():
        if _mapping(pipe).get("transform") is None:
            continue
        for index, source in enumerate(_items(_mapping(pipe).get("sources"))):
            stream = streams.get(source) if isinstance(source, str) else None
            if not _is_at_home(stream):
                text = (
                    f"{source!r} is on broker {_mapping(stream).get('on')}. A transform reads on the fleet's own broker only: it "
                    "writes its results there, and one query has one broker. Try: a pipe without a transform that copies "
                    f"{source!r} into a stream without `on`, and that stream as the source here"
                )
                yield ("pipes", name, "sources", index), text


def _is_at_home(stream: object) -> bool:
    """Whether the stream is on the fleet's own broker."""
    return _mapping(stream).get("on") in (None, DEFAULT)


def _check_tables(named: Sequence[str], sources: Sequence[str], tables: Mapping[str, object]) -> Iterator[Found]:
    """named: the tables of a transform."""
    for index, table in enumerate(named):
        path = ("transform", "tables", index)
        if table not in tables:
            yield path, f"{table!r} is not among tables: {', '.join(sorted(map(str, tables))) or 'none'}"
        if table in named[:index]:
            yield path, f"{table!r} occurs twice"
        if table in sources:
            yield (
                path,
                f"{table!r} is a source of this pipe, too. A table and a source cannot have the same name. Try: another name",
            )


def _check_outputs(outputs: Mapping[str, object], destinations: Sequence[Mapping[str, object]]) -> Iterator[Found]:
    known = f"is not among the outputs of its transform: {', '.join(map(str, outputs))}"
    for index, destination in enumerate(destinations):
        output = destination.get("from")
        if isinstance(output, str) and output not in outputs:
            without = f"{output!r}: the pipe's transform has no outputs. Try: outputs: {{{output}: {{where: …}}}} there"
            yield ("destinations", index, "from"), f"{output!r} {known}" if outputs else without
    heirs = dict[str, object]()
    for name, output in outputs.items():
        path = ("transform", "outputs", name)
        yield from _check_former(path, _former(output), "an output of this transform", list(outputs), heirs, name)


def _reaches(feeds: Mapping[str, set[str]], start: str, goals: set[str]) -> bool:
    """Whether events in stream `start` arrive in one of the streams `goals` by the pipes that `feeds` has."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        stream = waiting.pop()
        if stream in goals:
            return True
        if stream not in seen:
            seen.add(stream)
            waiting.extend(feeds.get(stream, ()))
    return False


def former_lanes(pipe: str, former_pipe: str | None, name: str, former_name: str | None) -> list[str]:
    """The former names of the lane of one destination, by `renamed_from` of its pipe and of itself; the latest first."""
    found = [f"{one}/{each}" for one in (former_pipe, pipe) if one for each in (name, former_name) if each]
    return [lane for lane in found if lane != f"{pipe}/{name}"]


def _check_renames(pipes: Mapping[str, object]) -> Iterator[Found]:
    heirs: dict[str, object] = {}
    for name, pipe in pipes.items():
        path, former = ("pipes", name), _former(pipe)
        if former and _mapping(pipe).get("transform") is not None:
            reason = "a pipe with a transform cannot be renamed: its output topic and its checkpoint have its name"
            remedy = f"the name {former!r} again; or no renamed_from, then the transform reads its sources from their beginning"
            yield (*path, "renamed_from"), f"{reason}. Try: {remedy}"
        yield from _check_former(path, former, "a pipe of this file", list(pipes), heirs, name)
        destinations = [_mapping(one) for one in _items(_mapping(pipe).get("destinations"))]
        names, heirs_here = [one.get("name") for one in destinations], dict[str, object]()
        for index, one in enumerate(destinations):
            path_here = (*path, "destinations", index)
            yield from _check_former(
                path_here, _former(one), "a destination of this pipe", names, heirs_here, one.get("name")
            )


def _check_former(
    path: KeyPath, former: str, what: str, names: Sequence[object], heirs: dict[str, object], name: object
) -> Iterator[Found]:
    """names: those that the file has. heirs: the new name by each former one so far; this one is added."""
    if not former:
        return
    if former in names:
        yield (*path, "renamed_from"), f"{former!r} is still {what}. Try: its former name, or no renamed_from"
    elif former in heirs:
        text = f"{former!r} is the former name of {heirs[former]!r} already. Try: renamed_from at one of them"
        yield (*path, "renamed_from"), text
    heirs.setdefault(former, name)


def _former(data: object) -> str:
    former = _mapping(data).get("renamed_from")
    return former if isinstance(former, str) else ""


def _check_removed(removed: Mapping[str, object], pipes: Mapping[str, object]) -> list[Found]:
    lanes = {
        f"{name}/{destination.get('name')}": "webhook" in destination
        for name, pipe in pipes.items()
        for destination in map(_mapping, _items(_mapping(pipe).get("destinations")))
    }
    renamed = {
        former: f"{name}/{destination.get('name')}"
        for name, pipe in pipes.items()
        for destination in map(_mapping, _items(_mapping(pipe).get("destinations")))
        for former in former_lanes(name, _former(pipe), str(destination.get("name")), _former(destination))
    }
    problems: list[Found] = []
    for lane, choice in removed.items():
        target = _mapping(choice).get("deliver_to")
        if lane in lanes or lane in pipes:
            problems.append(
                (("removed", lane), "is still in this file, so it gets its waiting events. Try: remove this entry")
            )
        if lane in renamed:
            problems.append(
                (
                    ("removed", lane),
                    f"is a former name of {renamed[lane]}, which gets its events. Try: remove this entry",
                )
            )
        if isinstance(target, str) and "/" not in lane:
            text = f"a pipe has several destinations. Try: an entry for each, `{lane}/DESTINATION: {{deliver_to: …}}`"
            problems.append((("removed", lane, "deliver_to"), text))
            continue
        if isinstance(target, str) and not lanes.get(target):
            known = ", ".join(sorted(name for name, is_webhook in lanes.items() if is_webhook)) or "there is none"
            problems.append((("removed", lane, "deliver_to"), f"{target!r} is no webhook of this file: {known}"))
    return problems


def _mapping(data: object) -> Mapping[str, object]:
    return data if isinstance(data, Mapping) else {}


def _items(data: object) -> Sequence[object]:
    return data if isinstance(data, list) else ()
