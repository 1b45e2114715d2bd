"""The simulator's goals on its two quickest traces, so that a change of the rules that misses them is seen."""

import pytest

from bench.simulator import groups, report, shards
from bench.simulator.others import OTHERS
from bench.simulator.traces import TRACES, Trace, draw_unseen
from services.autoscaler.shards.figures import RULES

pytestmark = pytest.mark.long

_BY_NAME = {trace.name: trace for trace in TRACES}


_MET = [_BY_NAME["a hot key"], draw_unseen(100)[1], draw_unseen(207)[0]]
"""The last two were missed by far: a crowd that nine shards met by nine splits, and a day that used up its updates too early."""


@pytest.mark.parametrize("trace", _MET, ids=lambda trace: f"{trace.name}, seed {trace.seed}")
def test_shards_do_better_than_the_best_other(trace: Trace) -> None:
    """Broken: a rule was changed, and other systems' rules are better now."""
    results = [shards.run_ours(trace), *(shards.run_other(trace, name) for name in OTHERS)]
    assert report.holds(results), report.table(report.Board("shard", "throttled", RULES.calm, [(trace.name, results)]))
    assert results[0].dropped == 0, "it wanted an update that the service does not give"
    assert results[0].reversals(RULES.calm) == 0


def test_groups_do_better_than_the_best_other() -> None:
    """Broken: as above, for groups."""
    trace = _BY_NAME["a flash crowd x10"]
    results = [groups.run_ours(trace), *(groups.run_other(trace, name) for name in OTHERS)]
    board = report.Board("instance", "that had to wait", 60.0, [(trace.name, results)])
    assert report.holds(results), report.table(board)
    assert report.plot(board).count("<polyline") == len(results)
