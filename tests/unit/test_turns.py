"""Long tests take turns: each has its day, and each is there."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support import turns

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("test", [test for group in turns.GROUPS for test in group])
def test_each_is_there(test: str) -> None:
    """Broken: a test was renamed, and runs every day; or one that is gone takes the turn of the others."""
    file, _, name = test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_each_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a test never runs."""
    every, days = {test for group in turns.GROUPS for test in group}, 60
    ran = Counter[str]()
    for day in range(20_000, 20_000 + days):
        monkeypatch.setenv(turns.VARIABLE, str(day))
        ran.update(every - set(turns.waiting()))
    assert ran == {test: days // len(group) for group in turns.GROUPS for test in group}
    monkeypatch.setenv(turns.VARIABLE, "all")
    assert not turns.waiting()


@pytest.mark.parametrize("count", [3, 4, 50, 400])
def test_three_days_do_all_cases_of_a_search(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Broken: a random search leaves out the same cases each day; or a single test, or a release, does not do all."""
    cases = range(7, 7 + count)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    ran = Counter[int]()
    for day in range(20_000, 20_003):
        monkeypatch.setenv(turns.VARIABLE, str(day))
        of_day = turns.cases_of_the_day(cases)
        assert len(turns.cases_of_the_day(range(2))) == 2, "too few to share"
        assert len(set(of_day)) == len(of_day) <= -(-count // turns.DAYS)
        ran.update(of_day)
    assert set(ran) == set(cases)
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert set(turns.cases_of_the_day(cases)) == set(cases)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv(turns.VARIABLE, "all")
    assert set(turns.cases_of_the_day(cases)) == set(cases)
