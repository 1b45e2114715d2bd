"""Where a transform begins after a reset to a time: it passes over no event, or says how many."""

import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from prometheus_client import REGISTRY

from services.core.broker.contract import TopicSpec
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.retention import remove_before
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.log.topics import add_partitions, create_topic, delete_topic
from services.core.control.transform_marks import Begin, TransformMark
from services.core.pipe_file.state_plan import StatePlan
from spark.brokers.log import LogSparkBroker
from spark.jobs.checkpoint import Checkpoint, CheckpointDamaged, Identity
from spark.jobs.modes import IN_PLAN, MODE_FILE, PER_BATCH
from spark.jobs.open_batches import REJECTED_FILE, REPORTED_FILE
from spark.jobs.restart import find_begins
from spark.sources.offsets import pack_offsets
from tests.spark.log_pipeline import LogPipeline, event, numbers, wait_for
from tests.spark.test_checkpoint import flights, ids, run_first

Parts = dict[str, dict[int, int]]


def topics_of(pipeline: LogPipeline) -> dict[str, str]:
    return LogSparkBroker(str(pipeline.log)).identify(pipeline.session, ["s", "u"])


def ends_of(pipeline: LogPipeline, topic: str = "s") -> dict[int, int]:
    return {partition: held.end for partition, held in blocking.ends(pipeline.log, topic).items()}


def mark_of(pipeline: LogPipeline, begins: Parts, former: str = "") -> TransformMark:
    """As `penstock group reset p --to TIME` writes it."""
    found = {topic: Begin(topics_of(pipeline)[topic], parts) for topic, parts in begins.items()}
    return TransformMark("reset", "", "ann", 1, begins=found, former=former)


def remove(pipeline: LogPipeline, topic: str, before: dict[int, int]) -> None:
    """As retention does."""
    with closing(TopicStore.open(DataFolder.prepare(pipeline.log), topic)) as store:
        for partition, offset in before.items():
            remove_before(store, partition, offset)


class Reset:
    """A pipe `p`, whose former checkpoints are written by hand, and a log with 20 records in each partition of `s` and `u`."""

    def __init__(self, pipeline: LogPipeline) -> None:
        self.pipeline, self.root = pipeline, Path(pipeline.checkpoints)
        self.topics = topics_of(pipeline)
        for topic in ("s", "u"):
            for first in (0, 10):
                records = [event(n, b"{}") for n in range(first, first + 10)]
                blocking.append(pipeline.log, topic, dict.fromkeys(range(3), records))

    def leave(self, done: Parts | None, name: str = "former", **identity: Any) -> None:
        """done: what the former transform has committed; None: no batch."""
        (folder := self.root / name).mkdir(parents=True)
        left = Identity(id="1", pipe="p", topics={"s": self.topics["s"]}, transform="", kind=PER_BATCH)
        (folder / "penstock.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(left, **identity)))
        for part in ("offsets", "commits"):
            (folder / part).mkdir()
        if done is not None:
            packed = orjson.dumps(pack_offsets({topic: (self.topics[topic], parts) for topic, parts in done.items()}))
            (folder / "offsets" / "0").write_bytes(b"v1\n{}\n" + packed)
            (folder / "commits" / "0").write_bytes(b"v1\n{}")

    def begins(self, begins: Parts, *sources: str, former: str = "former", mark: TransformMark | None = None) -> Parts:
        """Of a new checkpoint. mark: of an earlier reset; else as of one now."""
        pipeline, topics = self.pipeline, topics_of(self.pipeline)
        identity = Identity(id="2", pipe="p", topics={t: topics[t] for t in sources or ("s",)}, transform="", kind="")
        broker, found = LogSparkBroker(str(pipeline.log)), mark or mark_of(pipeline, begins, former)
        beginning = find_begins(pipeline.session, str(self.root), broker, identity, found)
        beginning.record("p")
        return beginning.begins

    def remove(self, topic: str, partition: int, before: int) -> None:
        remove(self.pipeline, topic, {partition: before})

    def make_anew(self, topic: str, records: int) -> None:
        delete_topic(folder := DataFolder.prepare(self.pipeline.log), topic)
        create_topic(folder, TopicSpec(topic, 3))
        blocking.append(self.pipeline.log, topic, {0: [event(n, b"{}") for n in range(records)]})


@pytest.fixture
def reset(pipeline: LogPipeline) -> Reset:
    return Reset(pipeline)


def left_out(reason: str) -> float:
    return REGISTRY.get_sample_value("penstock_transform_events_left_out_total", {"pipe": "p", "reason": reason}) or 0


def test_the_position_counts_where_it_comes_first(reset: Reset) -> None:
    """If this fails, a transform that was behind leaves out events without a word; or begins earlier than it must."""
    reset.leave({"s": {0: 5, 1: 15}})
    before = left_out("before_time"), left_out("gone")
    assert reset.begins({"s": {0: 10, 1: 10, 2: 10}}) == {"s": {0: 5, 1: 10, 2: 0}}, (
        "nobody has read the last partition"
    )
    zeros = {0: 0, 1: 0, 2: 0}
    both = {"s": {0: 5, 1: 15, 2: 0}, "u": zeros}
    assert reset.begins({"s": {0: 20, 1: 20}, "u": {0: 10}}, "s", "u") == both, "u is a new source"
    assert reset.begins({"s": {}}, "s", "u") == {"s": zeros, "u": zeros}, (
        "so is a source that was added since the reset"
    )
    assert (left_out("before_time"), left_out("gone")) == before, "nothing is left out that was not transformed"


def test_without_a_position_what_is_left_out_is_counted(reset: Reset) -> None:
    """If this fails, a reset to a time leaves out events that were never transformed, and no number says so."""
    before = left_out("before_time")
    assert reset.begins({"s": {0: 10, 1: 7, 2: 0}}, former="") == {"s": {0: 10, 1: 7, 2: 0}}
    assert left_out("before_time") == before + 17


def test_retention_took_what_was_not_transformed(reset: Reset) -> None:
    """If this fails, events that are gone are passed over without a word; or the transform waits for them for ever."""
    reset.leave({"s": {0: 5, 1: 15, 2: 20}})
    for partition in range(3):
        reset.remove("s", partition, 10)
    before = left_out("gone")
    assert reset.begins({"s": {0: 18, 1: 18, 2: 18}}) == {"s": {0: 10, 1: 15, 2: 18}}
    assert left_out("gone") == before + 5


def test_retention_took_what_the_time_named(reset: Reset) -> None:
    """If this fails, a start that comes late passes over events that were stored at the reset, without a word."""

    def gone(begins: Parts, former: str, expected: Parts) -> float:
        before = left_out("gone")
        assert reset.begins({}, mark=mark_of(reset.pipeline, begins, former)) == expected
        return left_out("gone") - before

    tens, late = {"s": dict.fromkeys(range(3), 10)}, {"s": {0: 20, 1: 20, 2: 20}}
    reset.leave(None, "nothing-read")
    reset.leave({"s": {0: 20, 1: 20}}, "two-read")  # the third was added later
    for partition in range(3):
        reset.remove("s", partition, 20)
    assert gone(tens, "nothing-read", late) == 30
    assert gone(tens, "two-read", late) == 10
    reset.make_anew("s", 20)
    reset.remove("s", 0, 10)
    reset.leave({"s": {0: 5, 1: 5, 2: 5}}, "of-another-topic")
    assert gone({"s": {0: 5}}, "of-another-topic", {"s": {0: 10, 1: 0, 2: 0}}) == 5


def test_retention_took_what_the_time_named_without_a_position(reset: Reset) -> None:
    """As above, after the loss of a cluster: there is no former checkpoint."""
    before = left_out("gone"), left_out("before_time")
    mark = mark_of(reset.pipeline, {"s": {0: 10, 1: 10, 2: 10}})
    reset.remove("s", 0, 20)
    assert reset.begins({}, mark=mark) == {"s": {0: 20, 1: 10, 2: 10}}
    assert (left_out("gone"), left_out("before_time")) == (before[0] + 10, before[1] + 20)


@pytest.mark.parametrize("torn", ["offsets/0", "commits/0", "offsets"])
def test_a_torn_former_checkpoint_is_not_one_that_read_nothing(reset: Reset, torn: str) -> None:
    """If this fails, what retention took since its position is not counted."""
    reset.leave({"s": {0: 15, 1: 15, 2: 15}}, ran=True)
    place = reset.root / "former" / torn
    if place.is_dir():
        for part in ("offsets", "commits"):
            shutil.rmtree(place.with_name(part))
    else:
        place.write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"cannot be read.*--to-earliest"):
        reset.begins({"s": {0: 10, 1: 10, 2: 10}})


def test_retention_took_what_was_not_transformed_of_a_source_that_the_reset_did_not_name(reset: Reset) -> None:
    """If this fails, a source that is removed and added again around a reset loses events without a word."""
    reset.leave({"s": {0: 15, 1: 15, 2: 15}, "u": {0: 5, 1: 15, 2: 20}}, topics=dict(reset.topics))
    reset.remove("u", 0, 10)
    before = left_out("gone"), left_out("before_time")
    begins = reset.begins({"s": dict.fromkeys(range(3), 20)}, "s", "u")
    assert begins == {"s": {0: 15, 1: 15, 2: 15}, "u": {0: 10, 1: 0, 2: 0}}
    assert (left_out("gone"), left_out("before_time")) == (before[0] + 5, before[1])


def test_one_of_two_sources_was_made_anew(reset: Reset) -> None:
    """If this fails, a position in a topic counts for another topic of its name, or the one of the other source is lost."""
    reset.leave({"s": {0: 5, 1: 5, 2: 5}, "u": {0: 3}}, topics=dict(reset.topics))
    reset.make_anew("u", 10)
    before = left_out("before_time")
    assert reset.begins({"s": {0: 10}, "u": {0: 6}}, "s", "u") == {"s": {0: 5, 1: 0, 2: 0}, "u": {0: 6, 1: 0, 2: 0}}
    assert left_out("before_time") == before + 6
    mark = mark_of(reset.pipeline, {"s": {0: 10}, "u": {0: 6}}, "former")
    reset.make_anew("u", 10)
    with pytest.raises(CheckpointDamaged, match="topic 'u' was deleted and created again since p was reset to a time"):
        reset.begins({}, "s", "u", mark=mark)
    assert reset.begins({}, "s", mark=mark) == {"s": {0: 5, 1: 0, 2: 0}}, "it is no source any more"


def test_a_partition_that_was_added_since_the_reset(reset: Reset) -> None:
    """If this fails, the first events of a partition that was added between a reset and the start are left out."""
    reset.leave({"s": {0: 15, 1: 15, 2: 15}})
    former, none = (mark_of(reset.pipeline, {"s": {0: 20, 1: 20, 2: 20}}, name) for name in ("former", ""))
    add_partitions(DataFolder.prepare(reset.pipeline.log), "s", 4)
    blocking.append(reset.pipeline.log, "s", {3: [event(n, b"{}") for n in range(5)]})
    assert reset.begins({}, mark=former) == {"s": {0: 15, 1: 15, 2: 15, 3: 0}}
    assert reset.begins({}, mark=none) == {"s": {0: 20, 1: 20, 2: 20, 3: 0}}


def test_resets_without_a_batch_between(reset: Reset) -> None:
    """If this fails, a second reset before the first batch forgets how far the transform was before the first one."""
    reset.leave({"s": {0: 5, 1: 5, 2: 0}})
    first = reset.begins({"s": {0: 10, 1: 3, 2: 10}})
    assert first == {"s": {0: 5, 1: 3, 2: 0}}
    reset.leave(None, "second", begins=first)
    assert reset.begins({"s": dict.fromkeys(range(3), 20)}, former="second") == first
    reset.leave(None, "third")  # it was to begin at the oldest event
    assert reset.begins({"s": dict.fromkeys(range(3), 20)}, former="third") == {"s": {0: 0, 1: 0, 2: 0}}


def test_retention_between_two_resets(reset: Reset) -> None:
    """If this fails, events that retention took between two resets without a batch are lost without a word, or counted twice."""
    wanted = {"s": dict.fromkeys(range(3), 20)}
    reset.leave({"s": {0: 5, 1: 20, 2: 20}})
    reset.remove("s", 0, 10)
    before = left_out("gone")
    first = reset.begins(wanted)
    assert first == {"s": {0: 10, 1: 20, 2: 20}}
    blocking.append(reset.pipeline.log, "s", {0: [event(n, b"{}") for n in range(20, 30)]})
    reset.remove("s", 0, 20)
    reset.leave(None, "second", begins=first)
    assert reset.begins(wanted, former="second") == wanted
    assert left_out("gone") == before + 15


def test_an_offset_behind_the_end(reset: Reset) -> None:
    """If this fails, a topic that lost its last records is read from the middle of those that got their offsets since."""
    refused = pytest.raises(CheckpointDamaged, match=r"p has offset 21 of s:0 .* ends at 20: records were lost")
    with refused:
        reset.begins({"s": {0: 21}}, former="")
    reset.leave({"s": {0: 21}})
    with refused:
        reset.begins({"s": {0: 10}})


def test_a_former_checkpoint_that_does_not_fit(reset: Reset) -> None:
    """If this fails, a reset to a time passes over events that were not transformed, because nobody could say which."""
    wanted = {"s": dict.fromkeys(range(3), 20)}
    with pytest.raises(CheckpointDamaged, match=r"the former checkpoint of p, is gone\. p needs its position"):
        reset.begins(wanted, former="another")
    plan = StatePlan([], {}, ["s"], "", "4.2.0", "")
    stateful: list[dict[str, Any]] = [{"state": "of a window"}, {"plan": plan}]
    for number, changed in enumerate(stateful):
        reset.leave({"s": {0: 5}}, f"stateful{number}", **changed)
        with pytest.raises(CheckpointDamaged, match="the former transform of p kept state"):
            reset.begins(wanted, former=f"stateful{number}")
    reset.leave({"s": {0: 5}}, "of_0_1", kind=IN_PLAN)
    (reset.root / "of_0_1" / "state" / "0").mkdir(parents=True)
    with pytest.raises(CheckpointDamaged, match="the former transform of p kept state"):
        reset.begins(wanted, former="of_0_1")
    reset.leave({"s": {0: 5}}, "foreign", pipe="q")
    with pytest.raises(CheckpointDamaged, match=r"foreign belongs to the pipe 'q', not 'p'.*reset p --to-earliest"):
        reset.begins(wanted, former="foreign")
    reset.leave({"s": {0: 5}}, "damaged", topics=3)
    with pytest.raises(CheckpointDamaged, match="the former checkpoint of p, cannot be read"):
        reset.begins(wanted, former="damaged")


@pytest.mark.parametrize("file", [REPORTED_FILE, REJECTED_FILE])
def test_what_follows_a_commit_counts_in_a_plan(reset: Reset, file: str) -> None:
    """If this fails, bad records or reports of a batch that was committed are lost by a reset to a time; or a note of an earlier
    mode repeats all events."""
    reset.leave({"s": {0: 15, 1: 15}}, kind=IN_PLAN)
    (reset.root / "former" / file).write_text('{"batch":-1,"end":[["s",0,"4"]]}')
    assert reset.begins({"s": dict.fromkeys(range(3), 20)}) == {"s": {0: 4, 1: 0, 2: 0}}, "the others were not read"
    (reset.root / "former" / MODE_FILE).write_text('"micro-batch"')
    assert reset.begins({"s": dict.fromkeys(range(3), 20)}) == {"s": {0: 15, 1: 15, 2: 0}}


def test_begins_where_a_reset_to_a_time_says(pipeline: LogPipeline) -> None:
    """If this fails, a transform reads all its sources again after a loss; or skips events behind its first batch; or its lag
    counts what it will not read."""
    chosen, checkpoint = run_first(pipeline)
    checkpoint.rename(checkpoint.with_name("former"))
    offsets = {partition: end - 1 for partition, end in ends_of(pipeline).items() if end > 1}
    pipeline.marks.newest["p"] = mark_of(pipeline, {"s": offsets})
    with pipeline.query(chosen) as query:
        every = dict.fromkeys(ends_of(pipeline), 0) | offsets
        places = {("s", p): n for p, n in every.items()}
        assert query.checkpoint.committed_offsets(query.broker.parse_offsets) == places
        assert query.checkpoint.begins() == {"s": (topics_of(pipeline)["s"], every)}
    pipeline.send(flights(30, 40))
    pipeline.run(chosen, 40 + len(offsets))
    pipeline.run(chosen, 40 + len(offsets))  # from its checkpoint, although that knows where it began
    counts = Counter(ids(pipeline))
    assert counts.keys() == {f"id-{n}" for n in range(40)}
    assert sorted(counts.values()) == [1] * (40 - len(offsets)) + [2] * len(offsets)


def test_a_reset_to_a_time_passes_over_no_event(pipeline: LogPipeline) -> None:
    """If this fails, a transform that was behind does not transform the events between its position and the time."""
    chosen, checkpoint = run_first(pipeline)
    checkpoint.rename(checkpoint.with_name("former"))
    pipeline.send(flights(30, 40))
    pipeline.marks.newest["p"] = mark_of(pipeline, {"s": ends_of(pipeline)}, "former")
    pipeline.run(chosen, 40)
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(40))


@pytest.mark.parametrize("has_read", [True, False])
def test_retention_before_the_first_batch(pipeline: LogPipeline, has_read: bool) -> None:
    """If this fails, retention between the start after a reset to a time and the first batch takes events without a word: of a
    transform that was behind by more than the retention, or that had not read anything."""
    if has_read:
        chosen, checkpoint = run_first(pipeline)
    else:
        chosen = pipeline.pipe(columns="delay INT", sql="SELECT event, delay FROM s", max_events=10)
        checkpoint = Path(pipeline.checkpoints) / "p"
        with pipeline.query(chosen):
            pass
    checkpoint.rename(checkpoint.with_name("former"))
    pipeline.send(flights(30, 40))
    oldest = ends_of(pipeline)
    pipeline.send(flights(40, 60))
    if has_read:
        remove(pipeline, "s", oldest)
    pipeline.marks.newest["p"] = mark_of(pipeline, {"s": ends_of(pipeline)}, "former")
    with pipeline.query(chosen) as query:
        assert (identity := query.checkpoint.read_identity()) is not None
        assert identity.begins == {"s": oldest if has_read else dict.fromkeys(oldest, 0)}
    remove(pipeline, "s", {0: ends_of(pipeline)[0]})
    pipeline.start(chosen)
    wait_for(lambda: "records are gone" in (pipeline.problem or ""), "the refusal")
    pipeline.stop()


def test_a_start_that_is_repeated_counts_once(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, each attempt of a start that cannot write its checkpoint counts the same events as left out again."""
    chosen, checkpoint = run_first(pipeline)
    checkpoint.rename(checkpoint.with_name("lost"))
    pipeline.marks.newest["p"] = mark_of(pipeline, {"s": ends_of(pipeline)})
    before = left_out("before_time")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write_identity", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"), pipeline.query(chosen):
                pass
    assert left_out("before_time") == before
    for _ in range(2):
        with pipeline.query(chosen):
            pass
    assert left_out("before_time") == before + 30


def test_a_first_batch_that_begins_at_a_time_is_the_same_again(pipeline: LogPipeline) -> None:
    """If this fails, a crash in the first batch after a reset to a time lets the transform read everything, or hides events that
    it never read."""
    chosen, checkpoint = run_first(pipeline)
    checkpoint.rename(checkpoint.with_name("former"))
    ends = {partition: end for partition, end in ends_of(pipeline).items() if end > 1}
    pipeline.marks.newest["p"] = mark_of(pipeline, {"s": {partition: end - 1 for partition, end in ends.items()}})
    pipeline.run(chosen, 30 + len(ends))
    for name in ("0", ".0.crc"):  # the batch is planned and stored, and Spark has not committed it
        (checkpoint / "commits" / name).unlink()
    for name in (REPORTED_FILE, REJECTED_FILE):
        (checkpoint / name).unlink(missing_ok=True)
    before, reports = len(pipeline.out), len(pipeline.reports)
    pipeline.send(flights(30, 40))
    pipeline.run(chosen, 30 + 2 * len(ends) + 10)
    assert len(pipeline.out) == before + 10
    again = numbers(pipeline.reports[reports:], "passed") | numbers(pipeline.reports[reports:], "filtered")
    assert len(again) == len(ends) + 10
