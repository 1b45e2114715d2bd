"""What `penstock check` says about the mode of a transform."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.core.pipe_transform import Transform
from services.fleet.transform_modes import _REASONS, expected_modes

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


@pytest.mark.parametrize("why", sorted(_REASONS.keys() - {"asked"}))
def test_a_refusal_names_the_alternative(why: str) -> None:
    """Broken: somebody learns that results come a second later, and not what to do about it."""
    transform, broker, master = REFUSED[why]
    pipes: Any = SimpleNamespace(pipes={"p": SimpleNamespace(transform=Transform.model_validate(transform))})
    found = expected_modes(pipes, broker, master)["p"]
    assert (found.mode, found.why) == ("micro-batch", why)
    assert ". Try: " in found.describe(is_known=True)
    assert ". Try: " not in found.describe(is_known=False), "on the embedded log it would help nobody"
    pipes.pipes["p"].transform = Transform.model_validate(SQL | {"mode": "real-time"})
    assert ". Try: mode: auto" in expected_modes(pipes, broker, master)["p"].describe(is_known=True)
