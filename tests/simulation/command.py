"""The command line of the simulation."""

import argparse
import gc
import itertools
import resource
import sys
from collections.abc import Iterable, Sequence
from math import inf

from tests.simulation import choice, clock
from tests.simulation.faults import find_fault
from tests.simulation.fleet import forget_metrics, replace_seams, show_logs
from tests.simulation.fleet_history import FleetHistory
from tests.simulation.history import Verdict
from tests.simulation.machine import keep_no_tasks
from tests.simulation.migrations import MigrationHistory
from tests.simulation.patches import PATCHES
from tests.simulation.readers import history as readers
from tests.simulation.readers.kafka_server import replace_connections
from tests.simulation.readers.log_world import replace_threads
from tests.simulation.tested_mends import MENDS, run_without
from tests.support.cpu_budget import CpuBudget

MEMORY_BYTES = 3 << 30
"""More than any history takes that ends. One that does not end must not take the memory of other tests."""
MAX_FAILED = 20
"""Histories that fail before the run stops: many fail for one reason, and some of them take minutes."""
PROVE_WITHIN = 20_000
"""Seeds in which the fault of each mend must be found."""


def run(seed: int, *, shown: bool = False, of_migrations: bool = False) -> Verdict:
    """One history."""
    forget_metrics()
    if shown:
        show_logs(print)
    make = MigrationHistory if of_migrations else readers.ReaderHistory if _is_of_readers(seed) else FleetHistory
    return make(seed, print if shown else None).run()


def _is_of_readers(seed: int) -> bool:
    """One history in four is of the backends' real reading code; the others are of the whole fleet."""
    return seed % 4 == 3


def _words(seed: int) -> frozenset[str]:
    return readers.choose(seed).words if _is_of_readers(seed) else choice.choose(seed).words


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this history and show it")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0, help="how many; 0: without end")
    parser.add_argument("--start-at", type=int, help="the seed to begin with; those before it come last")
    parser.add_argument("--cpu-seconds", type=float, help="begin no history after so many seconds of CPU")
    parser.add_argument("--migrations", action="store_true", help="histories of a stream that moves between brokers")
    parser.add_argument(
        "--tell", action="store_true", help="say also what came of histories in which nothing went wrong"
    )
    parser.add_argument("--first-failure", action="store_true", help="stop at the first history that breaks a promise")
    parser.add_argument(
        "--without", help="take out this mend (its name is in patches.py, readers/patches.py or tested_mends.py)"
    )
    parser.add_argument(
        "--prove", action="store_true", help="find the fault of each mend, taken out: by a seed or by its test"
    )
    parser.add_argument("--prove-tests", action="store_true", help="only those that are found by their tests")
    given = parser.parse_args()
    if given.prove or given.prove_tests:
        names = [given.without] if given.without else None
        unseen = 0 if given.prove_tests else prove(given.first, given.seeds or PROVE_WITHIN, names)
        return unseen + prove_by_tests(names)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    replace_seams()
    replace_connections()
    replace_threads()
    keep_no_tasks()
    sys.unraisablehook = lambda _unraisable: None  # what a killed process had open is thrown away, `finally` and all
    if given.seed is not None:
        return _report(run(given.seed, shown=True, of_migrations=given.migrations))
    failed, begun = 0, clock.real_seconds()
    gc.freeze()
    needs = next((patch.needs for patch in PATCHES if patch.name == given.without), frozenset[str]())
    budget = CpuBudget(given.cpu_seconds or inf)
    count = 0
    for count, seed in enumerate(_seeds(given.first, given.seeds, given.start_at), 1):
        if not given.migrations and not _words(seed) >= needs:
            continue
        verdict = run(seed, of_migrations=given.migrations)
        failed += _report(verdict) if verdict.complaints or given.tell else 0
        if failed >= (1 if given.first_failure else MAX_FAILED):
            break
        gc.collect()  # what is in cycles: while it is in the processor's caches, and not in the middle of a history
        if count % 100 == 0:
            print(
                f"{count} histories, {failed} failed, {(clock.real_seconds() - begun) / count * 1000:.0f} ms each",
                flush=True,
            )
        if not budget.is_left:
            break
    print(f"done: {count} histories, {failed} failed")
    return 1 if failed else 0


def prove(first: int, count: int, names: Sequence[str] | None = None) -> int:
    """Take out one mend after the other, and look for the seed that notices; says those and returns how many none did."""
    unseen = 0
    for patch in PATCHES:
        if names is not None and patch.name not in names:
            continue
        seed, complaint = find_fault(patch.name, first, count)
        print(
            f"{patch.name}: " + (f"seed {seed}: {complaint}" if seed is not None else f"not in {count} seeds"),
            flush=True,
        )
        unseen += seed is None
    return unseen


def prove_by_tests(names: Sequence[str] | None = None) -> int:
    """Take out one mend after the other, and run its test; says what it did, and returns how many passed all the same."""
    unseen = 0
    for mend in MENDS:
        if names is None or mend.name in names:
            is_noticed, said = run_without(mend)
            print(f"{mend.name}: {said if is_noticed else f'NOT NOTICED by {mend.test}: {said}'}", flush=True)
            unseen += not is_noticed
    return unseen


def _seeds(first: int, count: int, start_at: int | None) -> Iterable[int]:
    if not count:
        return itertools.count(first)
    start = first if start_at is None else start_at
    return itertools.chain(range(start, first + count), range(first, start))


def _report(verdict: Verdict) -> int:
    print(f"seed {verdict.seed}: {verdict.digest} {verdict.figures}")
    for complaint in verdict.complaints:
        print(f"    {complaint}")
    return 1 if verdict.complaints else 0
