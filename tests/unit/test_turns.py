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
