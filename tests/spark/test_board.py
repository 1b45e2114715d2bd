"""What the transform service says about itself: readiness, metrics, giving up."""

from prometheus_client import REGISTRY

from spark.board import OLD_JAVA_S, Board
from spark.jobs.job import ATTEMPTS, JobState


def test_ready_when_every_query_has_worked() -> None:
    """If this fails, work is sent to a transform that does not run, or a query that keeps failing looks ready."""
    board = Board(["a", "b"])
    assert board.ready() == "a: starting; b: starting"
    board.note_state(JobState("a", None, 0))
    assert board.ready() == "b: starting"
    board.note_state(JobState("b", None, 0))
    assert board.ready() is None
    for failures in range(1, ATTEMPTS + 1):
        board.note_state(JobState("b", "TransformBroken: it fails", failures))
        assert board.ready() == "b: TransformBroken: it fails"
    assert not board.given_up.is_set()
    board.note_state(JobState("b", None, 0))
    assert board.ready() is None


def test_gives_up_when_no_query_can_be_kept_running() -> None:
    """If this fails, a process whose queries are all dead lives on, and nobody starts another."""
    board = Board(["a", "b"])
    board.note_state(JobState("a", "broken", ATTEMPTS))
    assert not board.given_up.is_set()
    board.note_state(JobState("b", "broken", ATTEMPTS))
    assert board.given_up.is_set()


def test_one_pipe_gets_a_fresh_java() -> None:
    """If this fails, a pipe whose Spark is spoilt fails for ever because another pipe works; or each failure of one pipe, which
    another Java would not mend, stops the others every few minutes."""
    for spoilt, age_s, given_up in ((True, 60.0, False), (False, OLD_JAVA_S + 1, False), (True, OLD_JAVA_S + 1, True)):
        clock = iter([0.0, *[age_s] * 100])
        board = Board(["a", "b"], clock=clock.__next__)
        board.note_state(JobState("a", None, 0))
        for failures in range(1, ATTEMPTS):
            board.note_state(JobState("b", "OptionalDataException", failures, spoilt))
            assert not board.given_up.is_set()
        board.note_state(JobState("b", "OptionalDataException", ATTEMPTS, spoilt))
        assert board.given_up.is_set() == given_up


def test_backlog_is_shown_by_partition() -> None:
    """If this fails, `penstock status` cannot say how far a transform is behind."""
    board = Board(["behind"])
    board.note_backlog("behind", {("s", 0): 5, ("s", 1): 0})

    def value(partition: str) -> float | None:
        labels = {"group": "behind", "topic": "s", "partition": partition}
        return REGISTRY.get_sample_value("penstock_broker_lag_records", labels)

    assert (value("0"), value("1")) == (5.0, 0.0)
