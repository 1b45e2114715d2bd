"""A transform that has begun does not begin again, unless a person says so. Decided without Spark."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.control.transform_marks import TransformMark, write_transform_mark
from services.core.pipe_file.state_plan import StatePlan
from services.core.pipe_file.topic_names import CONTROL
from spark.errors import shorten
from spark.jobs.checkpoint import CheckpointDamaged
from spark.jobs.start_checks import adopt_checkpoint
from spark.marks import BrokerMarks
from tests.spark.stored_marks import StoredMarks
from tests.spark.test_state import HALF, HOUR, TOPICS, Folder, adopted, prepared

ROWS = "SELECT * FROM s"


def new() -> Any:
    """An empty checkpoint."""
    return Folder()


def test_a_lost_checkpoint_is_refused() -> None:
    """Broken: a transform whose checkpoint is gone, or on another volume, sends all results again, and nothing says so."""
    marks = StoredMarks()
    first = adopt_checkpoint(new(), prepared(ROWS), TOPICS, marks)
    assert marks.written == [("p", first.id)]
    lost = new()
    with pytest.raises(CheckpointDamaged) as error:
        adopt_checkpoint(lost, prepared(ROWS), TOPICS, marks)
    assert str(error.value) == (
        "checkpoint file:///data/checkpoints/p: it is gone, but the transform began at 2023-11-14T22:13:20.000Z with checkpoint "
        f"{first.id}. Try: restoring that one, or penstock group reset p --to-earliest (all results come again)"
    )
    assert shorten(error.value) == str(error.value), "/readyz cuts it"
    assert (lost.identity, marks.written) == (None, [("p", first.id)]), "the next start refuses it, too"


def test_the_remedies() -> None:
    """Broken: neither a restored checkpoint nor a reset lets the transform go on."""
    marks, folder = StoredMarks(), adopted()
    first = adopt_checkpoint(folder, prepared(HOUR), TOPICS, marks)
    assert adopt_checkpoint(folder, prepared(HOUR), TOPICS, marks).id == first.id, "restored"
    assert marks.written == [("p", first.id)], "one record for each checkpoint, not for each start"
    marks.newest["p"] = TransformMark("reset", first.id, "ann", 1)
    second = adopt_checkpoint(new(), prepared(HALF), TOPICS, marks)
    assert second.id != first.id
    folder.identity = msgspec.structs.replace(first, penstock="0.2.0")
    with pytest.raises(CheckpointDamaged, match=f"it is {first.id}, but .* with checkpoint {second.id}"):
        adopt_checkpoint(folder, prepared(HOUR), TOPICS, marks)


def test_a_reset_without_its_rename() -> None:
    """Broken: a reset that was killed, or that did not reach the checkpoint, stops the transform for good."""
    marks, folder = StoredMarks(), adopted()
    marks.newest["p"] = TransformMark("reset", folder.identity.id, "ann", 1)
    assert adopt_checkpoint(folder, prepared(HOUR), TOPICS, marks).id == folder.identity.id
    assert marks.written == [("p", folder.identity.id)]


def test_a_crash_between_the_checkpoint_and_its_mark() -> None:
    """Broken: the next start refuses a checkpoint that nothing was lost of; or a batch goes out before the mark is stored."""

    class Unreachable(StoredMarks):
        def write(self, pipe: str, checkpoint: str, plan: StatePlan | None) -> None:
            raise Unavailable("no answer")

    folder = new()
    with pytest.raises(Unavailable):
        adopt_checkpoint(folder, prepared(ROWS), TOPICS, Unreachable())
    assert folder.identity is not None
    marks = StoredMarks()
    assert adopt_checkpoint(folder, prepared(ROWS), TOPICS, marks).id == folder.identity.id
    assert marks.written == [("p", folder.identity.id)]


def test_checkpoints_of_earlier_versions() -> None:
    """Broken: after an update no pipe starts; or after the way back to 0.1 and a new checkpoint there, the pipe never starts."""
    marks, folder = StoredMarks(), adopted()
    adopt_checkpoint(folder, prepared(HOUR), TOPICS, marks)
    assert marks.written == [("p", folder.identity.id)], "it began before there were marks"
    begun_there = adopted()
    assert begun_there.identity.penstock == ""
    adopt_checkpoint(begun_there, prepared(HOUR), TOPICS, marks)
    assert marks.written[-1] == ("p", begun_there.identity.id) != marks.written[0]
    unreadable = StoredMarks(p=TransformMark("begun", "", "an unreadable mark", 1))
    adopt_checkpoint(folder, prepared(HOUR), TOPICS, unreadable)
    assert not unreadable.written, "a later version's mark stays"
    with pytest.raises(CheckpointDamaged, match="it is gone"):
        adopt_checkpoint(new(), prepared(HOUR), TOPICS, unreadable)


def test_a_refused_checkpoint_gets_no_mark() -> None:
    """Broken: a transform of another kind, which never ran, counts as begun."""
    for sql, rows, problem in ((HALF, False, "The results would be made of both"), (ROWS, True, "this one runs")):
        marks, folder = StoredMarks(), adopted()
        with pytest.raises(CheckpointDamaged, match=problem):
            adopt_checkpoint(folder, prepared(sql, row_by_row=rows), TOPICS, marks)
        assert not marks.written


async def test_marks_on_a_log_that_is_restored(tmp_path: Path) -> None:
    """Broken: a restored log and the checkpoint of the same moment are refused; or the log without its checkpoint is accepted."""
    kept = adopted()

    async def adopt(log: Path, folder: Any) -> str:
        async with open_broker(f"log://{log}") as broker, Producer(broker.appender) as producer:
            marks = BrokerMarks(broker.reader, producer)
            return (await asyncio.to_thread(adopt_checkpoint, folder, prepared(HOUR), TOPICS, marks)).id

    log, restored = tmp_path / "log", tmp_path / "restored"
    async with open_broker(f"log://{log}") as broker:
        await broker.admin.create_topic(TopicSpec(CONTROL, 1))
    assert await adopt(log, kept) == kept.identity.id
    shutil.copytree(log, restored)
    assert await adopt(restored, kept) == kept.identity.id
    with pytest.raises(CheckpointDamaged, match=f"it is gone, but .* with checkpoint {kept.identity.id}"):
        await adopt(restored, new())
    async with open_broker(f"log://{restored}") as broker, Producer(broker.appender) as producer:
        await write_transform_mark(producer, "p", "reset", kept.identity.id, "ann")
    assert await adopt(restored, new()) != kept.identity.id
