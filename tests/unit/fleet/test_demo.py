"""What `penstock demo` says while it waits."""

from typing import Any, cast

import pytest

from services.fleet.demo import stage
from services.fleet.demo.stage import read_loss


async def test_a_wait_for_the_observer_is_told_with_its_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: the demo stands still for a minute after its last event, and nobody knows why."""
    answers = iter([(0, 0), (500, 100), (1000, 0)])

    async def get(*_: object) -> dict[str, Any]:
        accepted, missing = next(answers)
        return {"minutes": [{"accepted": accepted, "missing": missing}]}

    monkeypatch.setattr(stage, "get_json", get)
    monkeypatch.setattr(stage, "POLL_EVERY_S", 0.01)
    monkeypatch.setattr(stage, "PLAIN_EVERY_S", 0.0)
    fleet = type("Plan", (), {"plan": type("Observed", (), {"observer": "127.0.0.1:1"})})
    found = await read_loss(cast("Any", fleet), "p", 1000)
    assert (found["accepted"], found["missing"]) == (1000, 0)
    said = " ".join(capsys.readouterr().err.split())
    assert "what they did: 0 of 1,000 events, for 0 s" in said
    assert "what they did: 400 of 1,000 events, for 0 s" in said
