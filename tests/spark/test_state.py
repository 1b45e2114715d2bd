"""Whether a transform may go on with the state in its checkpoint, decided without Spark."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.core.pipe_file.transform import Transform
from spark.jobs.checkpoint import Checkpoint, CheckpointDamaged, Identity
from spark.jobs.restart import Beginning
from spark.jobs.start_checks import adopt_checkpoint, changed_state, record_ran
from spark.transforms.preparation import Prepared
from tests.spark.stored_marks import StoredMarks

TOPICS = {"s": "made-once"}
HOUR = "SELECT window.start AS id, count(*) AS n FROM s GROUP BY window(event_time, '1 hour')"
HALF = HOUR.replace("1 hour", "30 minutes")


class Folder:
    """A checkpoint with the batches up to `batch`, or none."""

    path = "file:///data/checkpoints/p"

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.batch: int | None = None
        self.names = ["s"]

    damaged = Checkpoint.damaged

    def read_identity(self) -> Identity | None:
        return self.identity

    def write_identity(self, identity: Identity) -> None:
        self.identity = identity

    def newest(self, _folder: str) -> int | None:
        return self.batch

    def has_batch(self, _folder: str, batch: int) -> bool:
        return self.batch is not None and batch <= self.batch

    def has_metadata(self) -> bool:
        return self.batch is not None

    def check_readable(self) -> None:
        """It is."""

    def source_names(self, _batch: int) -> list[str]:
        return self.names

    def check_claim(self) -> None:
        """It is."""


def prepared(sql: str, columns: str = "delay INT", *, row_by_row: bool = False, **transform: Any) -> Prepared:
    view: Any = SimpleNamespace(columns=SimpleNamespace(simpleString=lambda: columns))
    definition: Any = SimpleNamespace(source=sql)
    out: Any = None
    return Prepared("p", Transform(sql=sql, **transform), {"s": view}, definition, out, row_by_row)


def adopted(*, row_by_row: bool = False) -> Any:
    folder: Any = Folder()
    adopt_checkpoint(folder, prepared(HOUR, row_by_row=row_by_row), TOPICS, StoredMarks())
    folder.batch = 3
    return folder


@pytest.mark.parametrize("changed", [prepared(HALF), prepared(HOUR, "delay BIGINT")], ids=["window", "columns"])
def test_another_transform_is_refused(changed: Prepared) -> None:
    """If this fails, an aggregate goes on with what another one counted, without a word."""
    folder = adopted()
    before = folder.identity
    said = changed_state(folder, changed) or ""
    assert "the state of another transform" in said
    for way in ("the former one again", "a pipe of another name", "penstock group reset p --to-earliest"):
        assert way in said
    with pytest.raises(CheckpointDamaged, match="The results would be made of both"):
        adopt_checkpoint(folder, changed, TOPICS, StoredMarks())
    assert folder.identity == before


def test_what_may_change() -> None:
    """If this fails, an operator has to give up results for a change that does not touch the state."""
    folder = adopted()
    adopt_checkpoint(folder, prepared(HOUR, watermark="10m", interval="1s", max_events=10), TOPICS, StoredMarks())
    stateless = adopted(row_by_row=True)
    adopt_checkpoint(stateless, prepared(HALF, row_by_row=True), TOPICS, StoredMarks())
    nothing_done = adopted()
    nothing_done.batch = None
    adopt_checkpoint(nothing_done, prepared(HALF), TOPICS, StoredMarks())


def test_the_mode_of_one_source_may_change() -> None:
    """If this fails, an upgrade to `mode: auto` calls each checkpoint damaged; or a mode changes although there is state, or the
    offsets are those of several sources."""
    stateless = adopted(row_by_row=True)
    live = replace(prepared(HOUR, row_by_row=True), real_time=True)
    adopt_checkpoint(stateless, live, TOPICS, StoredMarks())
    assert stateless.identity.kind == "per batch", "an older version could not go on with it"
    asked = replace(prepared(HOUR, row_by_row=True, mode="real-time"), real_time=True)
    adopt_checkpoint(stateless, asked, TOPICS, StoredMarks())
    in_plan: Any = Folder()
    adopt_checkpoint(in_plan, asked, TOPICS, StoredMarks())
    assert in_plan.identity.kind == "in plan"
    in_plan.batch = 3
    adopt_checkpoint(in_plan, prepared(HOUR, row_by_row=True), TOPICS, StoredMarks())
    with pytest.raises(CheckpointDamaged, match="runs in plan"):
        adopt_checkpoint(adopted(), prepared(HALF, row_by_row=True), TOPICS, StoredMarks())
    of_0_1 = adopted()
    of_0_1.identity = msgspec.structs.replace(of_0_1.identity, state="", penstock="")
    with pytest.raises(CheckpointDamaged, match="runs in plan"):
        adopt_checkpoint(of_0_1, prepared(HALF, row_by_row=True), TOPICS, StoredMarks())
    several: Any = adopted(row_by_row=True)
    several.identity = msgspec.structs.replace(several.identity, topics={**several.identity.topics, "u": "t"})
    with pytest.raises(CheckpointDamaged, match="runs per batch"):
        adopt_checkpoint(several, asked, TOPICS, StoredMarks())


def test_checkpoint_of_an_earlier_version() -> None:
    """If this fails, an update of Penstock refuses every aggregate, or takes a changed one."""
    folder = adopted()
    folder.identity = msgspec.structs.replace(folder.identity, state="")
    assert changed_state(folder, prepared(HALF)) is not None
    assert changed_state(folder, prepared(HOUR)) is None
    adopt_checkpoint(folder, prepared(HOUR), TOPICS, StoredMarks())
    assert folder.identity.state == prepared(HOUR).state


def test_a_query_that_failed_before_its_first_batch_starts_again() -> None:
    """If this fails, a worker that dies in a pipe's first second makes its new checkpoint count as damaged, for good."""
    folder: Any = Folder()
    identity = adopt_checkpoint(folder, prepared(HOUR), TOPICS, StoredMarks())
    assert not record_ran(folder, identity, StoredMarks()), (
        "the query of its bad records is done with a batch, this one has none"
    )
    identity = adopt_checkpoint(folder, prepared(HOUR), TOPICS, StoredMarks())
    folder.batch = 0
    assert record_ran(folder, identity, StoredMarks())
    assert record_ran(folder, folder.identity, StoredMarks())
    folder.batch = None
    with pytest.raises(CheckpointDamaged, match="its offsets are gone"):
        adopt_checkpoint(folder, prepared(HOUR), TOPICS, StoredMarks())


def test_a_transform_that_begins_at_a_time_gets_no_state() -> None:
    """If this fails, the first results of a window lack what came before; or a transform that has begun at the oldest event, and
    could keep state, is refused."""
    folder: Any = Folder()
    rows, begins = prepared("SELECT * FROM s", row_by_row=True), {"s": {0: 5}}
    found = adopt_checkpoint(folder, rows, TOPICS, StoredMarks(), begins_of=lambda *_: Beginning(begins))
    assert (found.begins, found.version) == (begins, 2), "0.1 would read the first batch from the oldest record on"
    assert "it was reset to a time, so it cannot keep state. Try: penstock group reset p --to-earliest" in (
        changed_state(folder, prepared(HOUR)) or ""
    )
    assert changed_state(folder, rows) is None
    folder.identity = msgspec.structs.replace(found, begins={})
    assert changed_state(folder, prepared(HOUR)) is None
    folder.identity, folder.batch = found, 3
    assert "the former one treated each event by itself" in (changed_state(folder, prepared(HOUR)) or "")
