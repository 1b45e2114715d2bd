"""What `penstock check` says about the mode of a transform."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.core.pipe_file.transform import Transform
from services.fleet.pipes.expected_modes import (
    _REMEDIES,
    ExpectedMode,
    describe_micro_batches,
    describe_modes,
    expected_modes,
)

SQL = {"sql": "SELECT event, value FROM s"}
KAFKA = "kafka://127.0.0.1:9092"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "broker": (SQL, "kinesis://eu-west-1", "local[2]"),
    "python": ({"python": "own.py:run"}, KAFKA, "local[2]"),
    "deduplication": (SQL | {"deduplicate_within": "1h"}, KAFKA, "local[2]"),
    "state": (SQL | {"watermark": "1m"}, KAFKA, "local[2]"),
    "interval": (SQL | {"interval": "1s"}, KAFKA, "local[2]"),
    "plan": (SQL | {"tables": ["names"]}, KAFKA, "local[2]"),
    "cluster": (SQL, KAFKA, "yarn"),
}


@pytest.mark.parametrize("why", sorted(_REMEDIES))
def test_a_refusal_names_the_alternative(why: str) -> None:
    """Broken: somebody learns that results come a second later, and not what to do about it; or `check` and `status` have two
    words for it."""
    transform, broker, master = REFUSED[why]
    pipes: Any = SimpleNamespace(pipes={"p": SimpleNamespace(transform=Transform.model_validate(transform))})
    found = expected_modes(pipes, broker, master)
    assert found == {"p": ("micro-batch", why)}
    [(_, status)] = describe_micro_batches([("p", why)])
    assert status.startswith("micro-batch, not real-time, in p: ")
    (line,) = describe_modes(found, is_known=True)
    assert line == f"{status}. For real-time mode: {_REMEDIES[why]}"
    assert [*describe_modes(found, is_known=False)] == [status], "on the embedded log it would help nobody"
    pipes.pipes["p"].transform = Transform.model_validate(SQL | {"mode": "real-time"})
    (asked,) = describe_modes(expected_modes(pipes, broker, master), is_known=True)
    assert "With mode: auto it takes what Spark allows" in asked


def test_pipes_of_one_reason_are_one_line() -> None:
    """Broken: fifty pipes on the embedded log are fifty lines, or one that may be fast on Kafka is called slow there."""
    modes = {"a": ExpectedMode("real-time", ""), "b": ExpectedMode("real-time", "")}
    (line,) = describe_modes(modes, is_known=False)
    assert line == "on the embedded log: micro-batch, not real-time, in a, b: only Kafka can be read in real-time mode"
    (line,) = describe_modes(modes, is_known=True)
    assert line == "perhaps real-time in a, b: Spark decides when the transform starts"
    told = [line for _, line in describe_micro_batches([("a", "slots"), ("b", "new_reason"), ("c", "slots")])]
    assert told == [
        "micro-batch, not real-time, in a, c: it needs more task slots (--master)",
        "micro-batch, not real-time, in b: new reason",
    ]
