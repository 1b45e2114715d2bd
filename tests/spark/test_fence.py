"""The fence of a checkpoint (ADR 0017): files that are created once, claims, and two real drivers that are frozen in turns."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import orjson
import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from services.core.aws_emulator import CREDENTIALS
from services.core.broker.log import blocking
from spark.java import HadoopFolder, jvm
from spark.jobs.checkpoint import open_checkpoint, peek_checkpoint
from spark.jobs.claims import CheckpointInUse, Claims
from spark.session import own_session
from tests.spark.log_pipeline import LogPipeline, numbers, wait_for
from tests.spark.service_process import LogService, ServiceProcess
from tests.spark.stored_checkpoint import StoredCheckpoint
from tests.spark.test_checkpoint import COLUMNS, flights, ids
from tests.support.object_store import BUCKET, ObjectStoreServer

ROOT = f"s3a://{BUCKET}/fleet"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def session(spark: SparkSession, s3: ObjectStoreServer) -> SparkSession:
    """A session of its own, whose checkpoints are in the bucket."""
    java: Any = spark.sparkContext._jsc
    java.hadoopConfiguration().set("fs.s3a.endpoint", s3.url)  # jobs make sessions of their own, which have it, too
    return own_session(spark)


@pytest.fixture(params=["folder", "s3"])
def folder(request: pytest.FixtureRequest, session: SparkSession, tmp_path: Path) -> HadoopFolder:
    place = f"file://{tmp_path}" if request.param == "folder" else f"s3a://{BUCKET}/{tmp_path.name}"
    return HadoopFolder(session, place)


def test_a_file_is_created_once(folder: HadoopFolder) -> None:
    """If this fails, two drivers plan one batch differently, and the log loses one of them."""
    outcomes: list[bool] = []
    writers = [
        threading.Thread(target=lambda n=n: outcomes.append(folder.create("offsets/7", b"plan %d" % n)))
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert sorted(outcomes) == [False, False, False, True]
    content = folder.read("offsets/7")
    assert folder.create("offsets/7", content), "an answer that was lost"
    assert not folder.create("offsets/7", b"another plan")
    assert folder.read("offsets/7") == content
    assert folder.list("offsets") == ["7"]
    assert folder.find("offsets/8") is None


def test_a_replaced_driver_removes_no_plan(folder: HadoopFolder, session: SparkSession) -> None:
    """If this fails, a driver that was frozen while it began real-time mode removes what its successor has planned: the pipe
    stops for good, because batches are done that nobody has planned."""
    classes = jvm(session)
    configuration = classes.org.apache.hadoop.conf.Configuration(folder._files.getConf())
    configuration.set("spark.penstock.claim.file", f"{folder._path}/claims/1-x")
    configuration.set("spark.penstock.claim.token", "x")
    files = classes.penstock.CheckpointFiles(classes.org.apache.hadoop.fs.Path(folder._path), configuration)
    for name in ("offsets/7", "offsets/8", "claims/1-x"):
        folder.create(name, b"x")
    files.delete(classes.org.apache.hadoop.fs.Path(f"{folder._path}/offsets/7"))
    folder.delete("claims/1-x")
    with pytest.raises(Py4JJavaError, match="another process has taken over"):
        files.delete(classes.org.apache.hadoop.fs.Path(f"{folder._path}/offsets/8"))
    assert folder.list("offsets") == ["8"]


def test_a_lost_answer_is_no_refusal(
    session: SparkSession, s3: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a broken connection makes a driver believe that another one planned its batch, or that nobody did."""
    lost: list[str] = []

    def lose(method: str, path: str) -> bool:
        if method == "PUT" and not lost:
            lost.append(path)
            return True
        return False

    monkeypatch.setattr(s3, "lose", lose)
    files = HadoopFolder(session, f"s3a://{BUCKET}/lost")
    assert files.create("offsets/0", b"the plan")
    assert lost == [f"/{BUCKET}/lost/offsets/0"]
    assert files.read("offsets/0") == b"the plan"


def test_a_replaced_holder_writes_nothing(session: SparkSession, s3: ObjectStoreServer) -> None:
    """If this fails, a driver that was frozen changes what its successor wrote, or is refused a note that it needs."""
    root = f"{ROOT}/notes"
    with open_checkpoint(session, root, "p") as first:
        first.write_note("penstock.json", {"n": 1})
        first.write_note("skipped.json", ["mine"])
        first.check_claim()
        with pytest.raises(CheckpointInUse, match="runs its queries"), open_checkpoint(session, root, "p"):
            pass
        folder = HadoopFolder(session, f"{root}/p/claims")
        folder.delete("1.alive")  # as if it had been silent for long
        with open_checkpoint(own_session(session), root, "p", Claims(folder)) as second:
            assert second.read_note("skipped.json", list[str]) == ["mine"]
            second.write_note("skipped.json", ["its"])
            first.write_note("skipped.json", ["late"])
            assert second.read_note("skipped.json", list[str]) == ["its"]
            assert peek_checkpoint(session, root, "p").read_note("skipped.json", list[str]) == ["its"]
            with pytest.raises(CheckpointInUse, match="taken over"):
                first.check_claim()
    with open_checkpoint(session, root, "p") as third:
        assert third.read_note("skipped.json", list[str]) == ["its"]
        assert third.read_note("penstock.json", dict[str, int]) == {"n": 1}
    assert s3.keys("fleet/notes/p/claims") == ["fleet/notes/p/claims/3"]
    folder.delete("3")  # by an operator who takes it for a lock
    with open_checkpoint(session, root, "p") as fourth:
        assert fourth.read_note("penstock.json", dict[str, int]) == {"n": 1}


@pytest.fixture
def on_s3(session: SparkSession, tmp_path: Path) -> Iterator[LogPipeline]:
    with LogPipeline(session, tmp_path, checkpoints=f"{ROOT}/{tmp_path.name}") as pipeline:
        yield pipeline


def test_a_pipe_goes_on_in_an_object_store(
    on_s3: LogPipeline, s3: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, checkpoints in S3 do not work, or each batch costs more requests than the documents say."""
    monkeypatch.setattr("spark.jobs.claims.BEAT_S", 600.0)  # requests that a slow machine makes more of in a batch
    monkeypatch.setattr("spark.jobs.job.BACKLOG_EVERY_S", 600.0)
    on_s3.send(flights(0, 100))
    chosen = on_s3.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", max_events=4, interval="10ms")
    on_s3.start(chosen)
    wait_for(lambda: on_s3.read >= 20, "the first batches")
    before, batches = s3.requests.copy(), len(on_s3.batches)
    wait_for(lambda: on_s3.read >= 90, "more batches")
    after, more = s3.requests.copy(), len(on_s3.batches) - batches
    per_batch = {method: round(count / more, 1) for method, count in (after - before).items()}
    print("requests of a batch", per_batch)
    on_s3.stop()
    assert per_batch["PUT"] < 4, per_batch
    assert sum(per_batch.values()) < 30, per_batch
    on_s3.send(flights(100, 150))
    on_s3.run(chosen, 150)
    assert ids(on_s3) == sorted(f"id-{n}" for n in range(150))


def test_state_moves_to_an_object_store_and_to_another_driver(
    pipeline: LogPipeline, session: SparkSession, s3: ObjectStoreServer
) -> None:
    """If this fails, a transform with state forgets it: when its checkpoint is copied to S3 as docs/clusters.md says, or when
    another driver takes over there."""
    pipeline.session = session
    pipeline.send(flights(0, 30))
    chosen = pipeline.pipe(
        columns=COLUMNS, sql="SELECT event, delay FROM s", deduplicate_within="1h", max_events=15, interval="10ms"
    )
    pipeline.run(chosen, 30)
    place, root = f"fleet/{pipeline.folder.name}", Path(pipeline.checkpoints)
    for file in (one for one in root.rglob("*") if one.is_file()):
        s3.client().put_object(Bucket=BUCKET, Key=f"{place}/{file.relative_to(root)}", Body=file.read_bytes())
    pipeline.checkpoints = f"s3a://{BUCKET}/{place}"
    first = pipeline.start(chosen)
    wait_for(lambda: first.holds_checkpoint, "the first driver")
    second = pipeline.start(chosen)
    wait_for(lambda: second.stands_by, "the second driver")
    pipeline.send([*flights(0, 30), *flights(30, 60)])  # the first ones again
    wait_for(lambda: len(pipeline.out) >= 60, "the events of the first driver")
    first.stop(600.0)
    wait_for(lambda: second.holds_checkpoint, "the takeover")
    pipeline.send([*flights(15, 60), *flights(60, 90)])
    wait_for(lambda: len(pipeline.out) >= 90, "the events of the second driver")
    pipeline.stop()
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(90))
    assert s3.keys(f"{place}/p/state")


def test_a_late_plan_is_carried_out(pipeline: LogPipeline) -> None:
    """If this fails, the last file of a driver that was frozen and replaced stops the pipe, or its events are lost or doubled."""
    pipeline.send(flights(0, 30))
    chosen = pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", interval="3s")
    pipeline.start(chosen)
    wait_for(lambda: pipeline.read >= 30, "the first batch")
    folder = HadoopFolder(pipeline.session, f"file://{pipeline.checkpoints}/p")
    checkpoint = peek_checkpoint(pipeline.session, pipeline.checkpoints, "p")
    late, sent = False, 30
    while not late:  # between two triggers of the query, which then plans all of these events
        done = checkpoint.newest("offsets")
        wait_for(lambda done=done: checkpoint.newest("commits") == done, "the batch before")  # type: ignore[misc]
        version, metadata, offset = folder.read(f"offsets/{done}").decode().splitlines()
        following = orjson.loads(offset)
        pipeline.send(flights(sent, sent + 30))
        sent += 30
        following["topics"]["s"]["next"]["0"] = blocking.ends(pipeline.log, "s")[0].end
        plan = "\n".join([version, metadata, orjson.dumps(following).decode()]).encode()
        late = folder.create(f"offsets/{(done or 0) + 1}", plan)
    wait_for(lambda: len(pipeline.out) >= sent, "all events")
    pipeline.stop()
    assert folder.read(f"offsets/{(done or 0) + 1}") == plan
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(sent))
    assert pipeline.reported("passed") == set(range(sent))
    assert any(state.problem for state in pipeline.states), "the plan came too late to mean anything"


PIPES = """
version: 1
streams:
  s: {columns: "delay INT"}
pipes:
  p:
    sources: [s]
    transform: {sql: "SELECT event, delay FROM s", max_events: 20, interval: 20ms}
    destinations: [{name: d, webhook: {url: "https://example.com/"}}]
"""
FREEZES = 2


class TwoDrivers:
    """Two services that run one pipe, its checkpoint in S3, and events that never cease."""

    def __init__(self, folder: Path, s3: ObjectStoreServer) -> None:
        place = f"fleet/{folder.name}"
        self.checkpoint, options = StoredCheckpoint(s3, place, "p"), s3.options(place)
        (folder / "b").mkdir()
        (folder / "b" / "pipes.yaml").write_text(PIPES)
        (folder / "a").mkdir()
        self.first = LogService(folder / "a", PIPES, ["p"], *options)
        self.second = ServiceProcess(folder / "b", f"log://{self.first.log}", *options)
        self.sent = 0
        self._stopping = threading.Event()
        self._sender = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Self:
        self.first.start()
        self.second.start()
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_sending()
        self.first.kill()
        self.second.kill()

    def stop_sending(self) -> None:
        self._stopping.set()
        self._sender.join(60)

    def _send(self) -> None:
        while not self._stopping.wait(0.05):
            if self.sent < self.done + 200:
                self.first.send(flights(self.sent, self.sent + 10))
                self.sent += 10

    @property
    def done(self) -> int:
        return sum(held.end for held in blocking.ends(self.first.log, "p.out").values())

    def holder(self) -> ServiceProcess:
        """Who has the claim, when it has begun."""
        return self.first if self.checkpoint.holder() == self.first.pid else self.second

    def plans(self) -> list[dict[str, int]]:
        """The ends of the planned batches, by partition."""
        return [plan["topics"]["s"]["next"] for plan in self.checkpoint.plans()]


def test_two_drivers_frozen_in_turns(s3: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, two drivers write under one checkpoint: events are lost or doubled, or reported otherwise than they are; or
    nobody takes over from a driver that hangs, or it does not notice.
    """
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    with TwoDrivers(tmp_path, s3) as drivers:
        for _ in range(FREEZES):
            before = drivers.done
            wait_for(lambda before=before: drivers.done > before + 60, "events")  # type: ignore[misc]
            time.sleep(chance.random())  # at any step of a batch
            claim, frozen = drivers.checkpoint.claim(), drivers.holder()
            lines = frozen.output.read_text().count("query_ended_by_takeover")
            frozen.signal(signal.SIGSTOP)
            wait_for(lambda claim=claim: drivers.checkpoint.claim() > claim, "the other one")  # type: ignore[misc]
            before, until = drivers.done, time.monotonic() + 20
            while (
                drivers.done < before + 60 and time.monotonic() < until
            ):  # in vain, if the frozen one has the log's lock
                time.sleep(0.1)
            frozen.signal(signal.SIGCONT)
            wait_for(
                lambda frozen=frozen, lines=lines: (  # type: ignore[misc]
                    frozen.output.read_text().count("query_ended_by_takeover") > lines
                ),
                "the thawed one stands by",
            )
        drivers.stop_sending()
        wait_for(lambda: drivers.done >= drivers.sent, "all events")
        everything = set(range(drivers.sent))
        wait_for(
            lambda: numbers(drivers.first.reports(), "passed") >= everything, "all reports"
        )  # they follow the output
        assert Counter(drivers.first.ids("p.out")) == Counter(f"id-{n}" for n in range(drivers.sent))
        reports = drivers.first.reports()
        assert numbers(reports, "passed") == everything
        assert not numbers(reports, "dead")
        assert not numbers(reports, "filtered")
        for earlier, later in pairwise(drivers.plans()):
            assert all(later[partition] >= end for partition, end in earlier.items())
