"""The simulation, as far as a test run has time for it: histories of many seeds, and faults that must be found."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.simulation.faults import find_fault
from tests.simulation.patch import ROOT, Patch
from tests.simulation.patches import PATCHES
from tests.simulation.tested_mends import MENDS, Mend, run_without
from tests.support.cpu_budget import report_cases
from tests.support.turns import cases_of_the_day

SEEDS = 2000
SHARE = 500
"""Seeds of a process. The workers share them."""
CPU_S = 240.0
"""For all of them, on three days: 40 seconds of two cores a day."""
MIGRATIONS, MIGRATIONS_CPU_S = 400, 40.0
"""Seeds of histories of a stream that moves, and how long they may take together."""
QUICK_WITHIN = 1000
OF_A_DAY = 2


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=1200)


def _search(request: pytest.FixtureRequest, name: str, seeds: list[int], limit_s: float, *kind: str) -> None:
    limits = ["--start-at", str(seeds[0]), "--cpu-seconds", str(limit_s)]
    found = _run(*kind, "--first", str(min(seeds)), "--seeds", str(len(seeds)), *limits)
    print(found.stdout[-5000:], found.stderr[-5000:])
    assert found.returncode == 0
    done = re.search(r"^done: (\d+) histories", found.stdout, re.MULTILINE)
    assert done is not None
    report_cases(request, name, int(done[1]), len(seeds))


@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_no_history_breaks_a_promise(first: int, request: pytest.FixtureRequest) -> None:
    """Broken: an acknowledged event is lost, altered or out of order, or what was refused arrives, in a seed's history.

    To see it: make simulate ARGS="--seed N".
    """
    seeds = cases_of_the_day(range(first, first + SHARE))
    _search(request, "the simulation", seeds, CPU_S * len(seeds) / SEEDS)


def test_no_migration_breaks_a_promise(request: pytest.FixtureRequest) -> None:
    """Broken: a stream that moves between brokers loses acknowledged events, or the order of a key, in a seed's history.

    To see it: make simulate ARGS="--migrations --seed N".
    """
    seeds = cases_of_the_day(range(MIGRATIONS))
    limit_s = MIGRATIONS_CPU_S * len(seeds) / MIGRATIONS
    _search(request, "the simulation's migrations", seeds, limit_s, "--migrations")


@pytest.mark.parametrize("seed", [21, 59, 63, 170])
def test_one_seed_is_one_history(seed: int) -> None:
    """Broken: a failing seed cannot be replayed."""
    first, second = _run("--seed", str(seed)).stdout, _run("--first", str(seed - 2), "--seeds", "3", "--tell").stdout
    digest = next(line for line in first.splitlines() if line.startswith(f"seed {seed}: "))
    assert digest in second.splitlines()


@pytest.mark.parametrize("patch", [*PATCHES, *MENDS], ids=lambda patch: patch.name)
def test_every_mend_is_where_its_patch_takes_it_out(patch: Patch | Mend) -> None:
    """Broken: a patch takes out nothing, and what it proves is not proven."""
    for change in patch.changes:
        text = (ROOT / change.file).read_text()
        assert change.apply(text) != text


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch.quick is not None], ids=lambda patch: patch.name)
def test_the_fault_of_a_mend_that_is_taken_out_is_found(patch: Patch) -> None:
    """Broken: the simulation sees nothing. The others: make simulate ARGS=--prove."""
    assert patch.quick is not None
    seed, complaint = find_fault(patch.name, patch.quick, QUICK_WITHIN)
    print(f"seed {seed}: {complaint}")
    assert seed is not None


def test_each_mend_has_one_patch() -> None:
    """Broken: `--without NAME` takes out another mend than the one that is meant; or a test that stands for a mend is gone."""
    names = [patch.name for patch in PATCHES] + [mend.name for mend in MENDS]
    assert len(names) == len(set(names))
    for mend in MENDS:
        file, _, name = mend.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text() if name else (ROOT / file).exists()


def test_the_mends_of_the_day_are_noticed_by_their_tests() -> None:
    """Broken: somebody takes out a mend, and no test fails. Another few each day; all: make simulate ARGS=--prove-tests."""
    short = [mend for mend in MENDS if not mend.is_long]
    first = int(time.time() // 86400) * OF_A_DAY
    chosen = [short[(first + number) % len(short)] for number in range(OF_A_DAY)]
    assert [mend.name for mend in chosen if not run_without(mend)[0]] == []
