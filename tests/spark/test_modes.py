"""Which mode a pipe gets, and why. Without Spark."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.pipe_file.transform import Transform
from services.core.yaml_source import BadConfiguration, Problem
from spark.health import QueryState
from spark.jobs.attempts import ATTEMPT_FILE, Attempt
from spark.jobs.checkpoint import Identity
from spark.jobs.job import Job
from spark.jobs.modes import MODE_FILE, REFUSED, MorePartitions, checkpoint_kind, choose_modes, enter_mode, prefer_plan
from spark.jobs.streaming_plan import READ_S, StreamingPlanQuery
from spark.settings import MOST_REAL_TIME_SLOTS, TransformSettings, load_pipes, size_master
from spark.transforms.preparation import Prepared

SQL = "SELECT event, a FROM s"


def pipe(name: str = "p", *, sources: int = 1, new: bool = False, obstacle: str = "", **transform: Any) -> Prepared:
    views: Any = {f"s{number}": None for number in range(sources)}
    out: Any = SimpleNamespace(carries_events=not new, payload=())
    given = transform if "python" in transform else {"sql": SQL} | transform
    row_by_row = "watermark" not in transform
    return Prepared(name, Transform(**given), views, None, out, row_by_row, obstacle=obstacle)  # type: ignore[arg-type]


class Folder:
    """A checkpoint with this identity, and so many batches that are done."""

    def __init__(self, identity: Identity | None = None, done: int | None = None) -> None:
        self.identity, self.done = identity, done

    def read_identity(self) -> Identity | None:
        return self.identity

    def newest(self, _folder: str) -> int | None:
        return self.done


def of_kind(kind: str, *topics: str, ran: bool = True) -> Identity:
    return Identity(id="x", pipe="p", topics=dict.fromkeys(topics, "t"), transform="", kind=kind, ran=ran)


def live(prepared: Prepared) -> Prepared:
    """As the pipe is prepared in real-time mode, where `event` has one field more."""
    sql = prepared.transform.sql or ""
    if "named_struct" in sql:
        raise BadConfiguration([Problem("pipes.yaml", "", "returns an `event` that is not the one it got")])
    shown: Any = SimpleNamespace(carries_events=True, payload=("read",) if "event.*" in sql else ())
    return replace(prepared, real_time=True, out=shown)


def modes(monkeypatch: pytest.MonkeyPatch, *pipes: Prepared, **known: Any) -> list[tuple[bool, str]]:
    """Of each pipe: whether it is in real-time mode, and why not."""
    return [(each.real_time, each.why_not) for each in chosen(monkeypatch, *pipes, **known)]


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    *pipes: Prepared,
    master: str = "local[5]",
    kafka: bool = True,
    folder: Folder | None = None,
    batch_timeout: str = "5m",
) -> list[Prepared]:
    """These pipes, whose sources have two partitions each."""
    broker: Any = SimpleNamespace(
        real_time=kafka, max_record_bytes=1, count_partitions=lambda _, topics: 2 * len(topics)
    )
    monkeypatch.setattr("spark.jobs.modes.peek_checkpoint", lambda *_: folder or Folder())
    by_name = {each.pipe: each for each in pipes}
    monkeypatch.setattr(
        "spark.jobs.modes.prepare_pipe",
        lambda _session, _selected, name, **_: live(by_name[name]),
    )
    session: Any = None
    settings = TransformSettings.model_validate({"master": master, "batch_timeout": batch_timeout})
    said: list[dict[str, Any]] = []
    monkeypatch.setattr("spark.jobs.modes.log", SimpleNamespace(info=lambda _event, **more: said.append(more)))
    found = choose_modes(session, settings, broker, session, pipes)
    assert all(". Try: " in one.get("because", ". Try: ") for one in said), "nobody knows what to do about it"
    for each in found:
        may_fall_back = each.real_time and each.transform.mode == "auto"
        assert (each.fallback is not None) is may_fall_back
        if each.fallback is not None:
            assert checkpoint_kind(each.fallback) == checkpoint_kind(each), "it cannot go on from its checkpoint"
        assert not each.real_time or each.transform.mode != "auto" or each.partitions == 2 * len(each.views)
        assert each.real_time or not each.partitions
    return found


@pytest.mark.parametrize(
    ("prepared", "why"),
    [
        (pipe(), ""),
        (pipe(sources=2), ""),
        (pipe(interval="1s"), "interval"),
        (pipe(python="t.py:f"), "python"),
        (pipe(deduplicate_within="1h"), "deduplication"),
        (pipe(watermark="1m"), "state"),
        (pipe(new=True), "new_events"),
        (pipe(obstacle="joins tables"), "plan"),
        (pipe(sql="SELECT event, event.* FROM s"), "event"),
        (pipe(sql="SELECT named_struct('id', event.id) AS event FROM s"), "event"),
        (replace(pipe(sql="SELECT event, to_json(event) FROM s"), shows_event=True), "event"),
        (pipe(sources=3), "slots"),
    ],
)
def test_reasons(monkeypatch: pytest.MonkeyPatch, prepared: Prepared, why: str) -> None:
    """If this fails, a pipe runs in a mode that Spark refuses, or that loses origins; or it is slow without need, or nobody knows
    what to do about it."""
    assert modes(monkeypatch, prepared) == [(not why, why)]


def test_a_refusal_of_spark_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a pipe that asks for real-time mode, which Spark refuses, fails for ever and says only Spark's words; or one
    that goes on in micro-batches does not say how to avoid the refusal at each start."""
    said: list[dict[str, Any]] = []
    quiet = SimpleNamespace(error=lambda *_, **__: None, warning=lambda _event, **more: said.append(more))
    monkeypatch.setattr("spark.jobs.job.log", quiet)
    states: list[QueryState] = []
    none: Any = None
    refusal = RuntimeError(
        f"[{REFUSED}.OPERATOR_OR_SINK_NOT_IN_ALLOWLIST] The operator(s): Sort are not in the allowlist."
    )
    live = replace(pipe(mode="real-time"), real_time=True)
    for prepared in (live, replace(live, fallback=pipe()), pipe(mode="micro-batch")):
        job = Job(prepared, none, none, checkpoints="", ledger=False, on_batch=none, on_state=states.append)
        job.stop(0.0)  # else it waits before the next attempt
        if not job._fall_back(refusal):
            job._record_failure(refusal)
    asked, other = (state.problem or "" for state in states)
    assert asked.endswith("in the allowlist. Try: mode: micro-batch, or mode: auto, which takes what Spark allows")
    assert "Try:" not in other
    assert said[0]["hint"].startswith("Try: mode: micro-batch")


def test_what_is_not_of_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a pipe on the log or on a cluster, or one whose file says micro-batch, runs in real-time mode."""
    assert modes(monkeypatch, pipe(), kafka=False) == [(False, "broker")]
    assert modes(monkeypatch, pipe(), master="spark://host:7077") == [(False, "cluster")]
    assert modes(monkeypatch, pipe(mode="micro-batch")) == [(False, "")]
    assert modes(monkeypatch, pipe(), batch_timeout="100s") == [(False, "batch_timeout")]


def test_slots_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, real-time pipes take all task slots, and a partition, or every other pipe, waits for ever."""
    three = [pipe(name) for name in "abc"]
    assert modes(monkeypatch, *three) == [(True, ""), (True, ""), (False, "slots")]
    assert modes(monkeypatch, *three, master="local[6]")[2] == (False, "slots")
    assert modes(monkeypatch, *three, master="local[7]")[2] == (True, "")
    asked = replace(pipe("z", mode="real-time"), real_time=True)
    assert modes(monkeypatch, pipe("a"), pipe("b"), asked) == [(True, ""), (False, "slots"), (True, "")]


@pytest.mark.parametrize(("master", "room"), [("local[5]", 4), ("local[8]", 7), ("spark://host:7077", 0)])
def test_partitions_that_nobody_reads_are_named(monkeypatch: pytest.MonkeyPatch, master: str, room: int) -> None:
    """If this fails, events of a partition that was added wait for ever in a pipe that asks for real-time mode, and only the lag
    shows it."""
    (asked,) = chosen(monkeypatch, replace(pipe(mode="real-time"), real_time=True), master=master)
    assert asked.partitions == room
    said: list[dict[str, Any]] = []
    monkeypatch.setattr("spark.jobs.streaming_plan.log", SimpleNamespace(error=lambda event, **more: said.append(more)))
    running = StreamingPlanQuery.__new__(StreamingPlanQuery)
    counts = iter((2, room, room + 1, room + 1, room + 2))
    checkpoint = SimpleNamespace(offsets=lambda *_: range(next(counts)))
    made: Any = SimpleNamespace(
        prepared=asked, pipe="p", checkpoint=checkpoint, broker=SimpleNamespace(parse_offsets=None)
    )
    running._query, running._last_batch, running._partitions = made, 1, 0
    for _ in range(5):
        running._check_partitions()
    assert [each["partitions"] for each in said] == ([room + 1, room + 2] if room else [])
    if room:
        fallback: Any = replace(asked, fallback=asked)
        made.prepared, made.checkpoint = fallback, SimpleNamespace(offsets=lambda *_: range(room + 3))
        with pytest.raises(MorePartitions, match=f"{room + 3} partitions, and task slots for {room}"):
            running._check_partitions()


@pytest.mark.parametrize(
    ("prepared", "kafka", "in_plan"),
    [
        (pipe(mode="micro-batch"), True, True),
        (pipe(mode="micro-batch"), False, False),
        (pipe(mode="micro-batch", sources=2), True, False),
        (pipe(python="t.py:f"), True, False),
        (pipe(deduplicate_within="1h"), True, False),
        (pipe(watermark="1m"), True, False),
        (pipe(new=True), True, False),
        (pipe(obstacle="joins tables"), True, False),
    ],
)
def test_micro_batches_of_one_plan(prepared: Prepared, kafka: bool, in_plan: bool) -> None:
    """If this fails, a pipe goes on from a checkpoint with other sources, reads a table once for ever, or drops duplicates not at
    all; or it costs a third more without need."""
    broker: Any = SimpleNamespace(real_time=kafka)
    assert prefer_plan(broker, prepared).in_plan is in_plan


@pytest.mark.parametrize("known", [None, "per batch", "in plan"])
def test_several_sources_go_on_in_micro_batches(monkeypatch: pytest.MonkeyPatch, known: str | None) -> None:
    """If this fails, a pipe of two streams that ran in real-time mode is refused for good once partitions are added, or its file
    asks for micro-batches: its checkpoint has offsets for each source."""
    folder = Folder() if known is None else Folder(of_kind(known, "s0", "s1"), done=7)
    for each in (pipe(sources=2), pipe(sources=2, mode="micro-batch")):
        found = chosen(monkeypatch, each, master="local[3]", folder=folder)
        assert not found[0].real_time
        assert checkpoint_kind(found[0]) == (known or "per batch")
        assert found[0].in_plan is (known == "in plan")


@pytest.mark.parametrize("before", ["in plan", "real-time", "micro-batch"])
def test_parts_of_another_mode_are_forgotten(before: str) -> None:
    """If this fails, a batch goes on behind parts that were only tried, after a change of mode: their events are lost."""
    notes: dict[str, Any] = {MODE_FILE: before, ATTEMPT_FILE: Attempt(7, "v", parts=(), done=16)}
    checkpoint: Any = SimpleNamespace(
        newest=lambda _: None, read_note=lambda name, _: notes.get(name), write_note=notes.__setitem__
    )
    query: Any = SimpleNamespace(prepared=pipe(mode="micro-batch"), checkpoint=checkpoint)
    enter_mode(query, "per batch")
    assert (notes[ATTEMPT_FILE].batch == 7) is (before == "micro-batch")
    assert notes[MODE_FILE] == "micro-batch"


@pytest.mark.parametrize(
    ("sources", "folder", "why"),
    [
        (1, Folder(of_kind("per batch", "s0"), done=7), ""),
        (1, Folder(of_kind("in plan", "s0"), done=7), ""),
        (2, Folder(of_kind("in plan", "s0", "s1"), done=7), ""),
        (2, Folder(of_kind("per batch", "s0", "s1"), done=7), "checkpoint"),
        (1, Folder(of_kind("per batch", "s0", "gone"), done=7), "checkpoint"),
        (1, Folder(of_kind("per batch", "s0")), "checkpoint"),
        (1, Folder(of_kind("per batch", "s0", ran=False)), ""),
    ],
)
def test_checkpoints(monkeypatch: pytest.MonkeyPatch, sources: int, folder: Folder, why: str) -> None:
    """If this fails, an upgrade breaks a pipe that ran in micro-batches: real-time mode cannot go on from its checkpoint."""
    assert modes(monkeypatch, pipe(sources=sources), folder=folder) == [(not why, why)]


def test_the_default_master_has_room(tmp_path: Path) -> None:
    """If this fails, no pipe runs in real-time mode by default, or a service on the log has threads without work."""
    streams = {"a": {"partitions": 4}, "b": {"partitions": 2, "max_partitions": 6}, "c": {"partitions": 40}}
    destinations = [{"name": "d", "webhook": {"url": "https://example.com/"}}]

    def master(broker: str, given: str = "auto", **pipes: dict[str, Any]) -> str:
        path = tmp_path / "pipes.yaml"
        made = {
            name: {"sources": sources.split("+"), "transform": transform, "destinations": destinations}
            for name, (sources, transform) in pipes.items()
        }
        path.write_text(json.dumps({"version": 1, "streams": streams, "pipes": made}))
        settings = TransformSettings(pipes=path, broker=broker, master=given)
        return size_master(settings, load_pipes(settings)).master

    def sql(name: str, **more: Any) -> Any:
        return name, {"sql": f"SELECT event, value FROM {name.partition('+')[0]}", **more}

    kafka = "kafka://127.0.0.1:9"
    assert master(kafka, p=sql("a")) == "local[6]"
    assert (
        master(kafka, p=sql("a"), q=sql("a+b"), r=sql("a", mode="micro-batch"), t=sql("a", interval="1s"))
        == "local[16]"
    )
    assert master(kafka, p=sql("c")) == f"local[{2 + MOST_REAL_TIME_SLOTS}]"
    assert master(kafka, given="local[3]", p=sql("a")) == "local[3]"
    assert master(kafka, p=sql("a", deduplicate_within="1m"), q=sql("b", watermark="1m")) == "local[2]"
    assert master("log:///x", p=sql("a")) == "local[2]"


def test_a_real_time_query_is_ready_when_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a fleet on Kafka is ready 15 s too late; or one is ready whose query fails on each start."""
    stages = {7: SimpleNamespace(numActiveTasks=0)}
    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda group: {"run": [1, 2]}[group],
        getJobInfo={1: None, 2: SimpleNamespace(stageIds=[6, 7])}.get,
        getStageInfo=stages.get,
    )
    now = 100.0
    monkeypatch.setattr("spark.jobs.streaming_plan.time.monotonic", lambda: now)
    running = StreamingPlanQuery.__new__(StreamingPlanQuery)
    context = SimpleNamespace(statusTracker=lambda: tracker)
    made: Any = SimpleNamespace(real_time=True, session=SimpleNamespace(sparkContext=context))
    first: Any = SimpleNamespace(lastProgress=None, status={"message": "Processing new data"}, runId="run")
    running._query, running._transforming, running._reads_since = made, first, None
    for tasks, seconds, ready in ((0, 100, False), (4, 0, False), (4, READ_S + 1, True), (0, 1, False), (4, 1, False)):
        stages[7].numActiveTasks, now = tasks, now + seconds
        assert running.has_completed_trigger() is ready
    made.real_time, now = False, now + 2 * READ_S
    assert not running.has_completed_trigger()
