"""Replays each trace against each policy, prints tables, and writes the plots. Half a minute; no broker.

python -m bench.simulator [--only shards|groups] [--images docs/images] [--decisions]
python -m bench.simulator --unseen 20    # traces that nobody looked at; half a minute each
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from bench.simulator import groups, report, shards
from bench.simulator.others import OTHERS
from bench.simulator.result import Result
from bench.simulator.traces import TRACES, Trace, draw_unseen
from services.autoscaler.shards.figures import RULES

_GROUP_CALM_S = 60.0
"""Two cool-downs of a group, by its defaults."""


def main() -> None:
    """Exit status 0 whatever the figures are: they are figures, not tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("shards", "groups"), help="these alone")
    parser.add_argument("--images", type=Path, help="a folder for the plots; absent: none are written")
    parser.add_argument("--decisions", action="store_true", help="say why our shard policy acted, on stderr")
    parser.add_argument("--unseen", type=int, metavar="N", help="N sets of traces drawn at random, counted by kind")
    parser.add_argument("--from", type=int, default=100, dest="first", help="the seed of the first of them")
    args = parser.parse_args()
    if args.unseen is not None and args.images is not None:
        parser.error("--images draws the chosen traces only: leave out --unseen")
    drawn = [TRACES] if args.unseen is None else [draw_unseen(args.first + number) for number in range(args.unseen)]
    traces = [trace for some in drawn for trace in some]
    show = partial(_show, images=args.images) if args.unseen is None else _count
    if args.only != "groups":
        board = [(trace.name, _on_shards(trace, args.decisions)) for trace in traces]
        show(report.Board("shard", "throttled", RULES.calm, board))
    if args.only != "shards":
        board = [(trace.name, _on_groups(trace)) for trace in traces if trace.hot is None]
        show(report.Board("instance", "that had to wait", _GROUP_CALM_S, board))


def _on_shards(trace: Trace, tell: bool) -> list[Result]:
    if tell:
        print(f"{trace.name}, seed {trace.seed}", file=sys.stderr)
    ours = shards.run_ours(trace, (lambda text: print(text, file=sys.stderr)) if tell else (lambda _text: None))
    return [ours, *(shards.run_other(trace, other) for other in OTHERS)]


def _on_groups(trace: Trace) -> list[Result]:
    return [groups.run_ours(trace), *(groups.run_other(trace, name) for name in OTHERS)]


def _count(board: report.Board) -> None:
    print(f"\n{report.counts(board)}")


def _show(board: report.Board, images: Path | None) -> None:
    print(f"\n{report.table(board)}\n")
    for trace, results in board.results:
        print(f"{trace}: {'holds' if report.holds(results) else 'falls short'}")
    if images is not None:
        path = images / f"autoscaler-{board.unit}s.svg"
        path.write_text(report.plot(board), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
