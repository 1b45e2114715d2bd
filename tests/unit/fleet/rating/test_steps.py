"""The course of a rating against a simulated instance: it finds the capacity, and says what limited it."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from services.fleet.problem import CommandFailed
from services.fleet.rating.rig import RIGS, LoadShape, run_rating
from services.fleet.rating.steps import MOST_RATES, RatingStep, next_rate, rate_of, step_line, summary
from services.fleet.stop import Stop


def instance(rate: float, capacity: float, full: float = 1.0, source: float = 0.2, machine: float = 0.5) -> RatingStep:
    """One core at `capacity` events a second; beyond, it falls behind."""
    done = min(rate, capacity)
    return RatingStep(rate, 5.0, rate, done, 5.0 * (1 - done / rate), full * done / capacity, source, machine)


def run(capacity: float, first: float = 500.0, **how: float) -> list[RatingStep]:
    steps: list[RatingStep] = []
    while (rate := next_rate(steps, first)) is not None:
        steps.append(instance(rate, capacity, **how))
    return steps


@pytest.mark.parametrize("capacity", [700.0, 4321.0, 60_000.0])
def test_finds_what_an_instance_takes(capacity: float) -> None:
    """Broken: the rating is off by more than the last steps are apart, or the target is not below the plateau."""
    steps = run(capacity)
    rating = rate_of(steps)
    assert 0.85 * capacity <= rating.rate <= capacity * 1.12  # half a second behind after five still counts as kept
    assert rating.limit == "instance"
    assert rating.plateau_cpu == pytest.approx(1.0)
    assert rating.target_cpu == pytest.approx(0.75)


def test_an_instance_that_waits_for_its_disk_gets_a_lower_target() -> None:
    """Broken: a group of instances that never reach a full core is never enlarged."""
    assert rate_of(run(5000.0, full=0.4)).target_cpu == pytest.approx(0.3)


def test_goes_down_when_the_first_step_is_too_much() -> None:
    """Broken: a slow machine gets no rating at all."""
    rating = rate_of(run(300.0))
    assert 125 <= rating.rate <= 340
    hopeless = rate_of(run(10.0))
    assert hopeless.rate == 0
    assert "did not keep pace" in summary("expel", hopeless)[0]


def test_says_when_the_load_was_the_limit_or_nothing_was() -> None:
    """Broken: the load's own weakness is reported as the instance's."""
    assert rate_of(run(5000.0, full=0.5, source=0.97)).limit == "machine"
    assert rate_of(run(5000.0, full=0.5, machine=0.99)).limit == "machine"
    assert rate_of(run(5000.0, full=1.0, source=0.97)).limit == "instance"
    unmade = dataclasses.replace(instance(9000.0, 5000.0, full=0.5), made=5000.0)
    assert rate_of([instance(500.0, 5000.0, full=0.5), unmade, unmade]).limit == "machine"
    endless = run(1e12)
    assert (len(endless), rate_of(endless).limit) == (MOST_RATES, "none")


def test_one_stall_is_not_the_end() -> None:
    """Broken: a disk that stands still for a moment makes a tenth of the rating."""
    steps: list[RatingStep] = []
    while (rate := next_rate(steps, 500.0)) is not None:
        stalls = len(steps) == 1
        steps.append(instance(rate, 100.0 if stalls else 9000.0))
    assert [step.rate for step in steps[:3]] == [500.0, 750.0, 750.0]
    assert rate_of(steps).rate > 7500
    assert (
        rate_of([*steps[:1], instance(750.0, 100.0, full=0.3), *run(5000.0, first=750.0, full=0.5, machine=1.0)]).limit
        == "machine"
    )


def test_lines() -> None:
    """Broken: a step that was not kept looks like one that was."""
    assert step_line(instance(1000.0, 2000.0)) == "     1,000      1,000    0.0 s  0.50 ████████████            "
    assert step_line(instance(3000.0, 2000.0)).endswith("1.00 ████████████████████████  not kept")
    assert (
        summary("expel", rate_of(run(4321.0)))[0] == "One expel instance handles 4,700 events a second on this machine."
    )


def test_what_a_killed_rating_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each `penstock rate` that is killed leaves its log, up to some GB, for ever."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "penstock-rate-killed"
    left.mkdir()
    (left / "penstock.lock").touch()
    seen = list[Path]()

    def broken_rig(folder: Path, *_: object) -> None:
        seen.append(folder)
        raise CommandFailed("it does not start")

    monkeypatch.setitem(RIGS, "expel", broken_rig)
    with pytest.raises(CommandFailed):
        asyncio.run(run_rating("expel", LoadShape(1, 1), 1.0, 1.0, Stop(), lambda _step: None))
    assert seen[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []
