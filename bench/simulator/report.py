"""What came of it: tables in Markdown, a plot as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.simulator.result import Result

_COLOURS = {
    "Penstock": "#d6336c",
    "Kubernetes HPA": "#1c7ed6",
    "AWS target tracking": "#f08c00",
    "fixed thresholds": "#2f9e44",
}
MOST_COST = 1.05
"""The goal, of the best other's hours."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 720, 150, 44, 26, 46
_POINTS = 360


@dataclass(frozen=True, slots=True)
class Board:
    """unit: of the hours. over: what happens to events above capacity. calm: two cool-downs, in seconds.

    results: by trace, of all policies, ours first.
    """

    unit: str
    over: str
    calm: float
    results: Sequence[tuple[str, Sequence[Result]]]


def best_other(results: Sequence[Result]) -> Result:
    """The one with the fewest events over capacity, then the cheapest."""
    return min(results[1:], key=lambda one: (round(one.throttled), one.hours))


def fewer(results: Sequence[Result]) -> bool:
    """Fewer events over capacity than the best other, or none, as it."""
    ours = results[0].throttled
    return ours < best_other(results).throttled or ours == 0


def holds(results: Sequence[Result]) -> bool:
    """The goal: fewer events over capacity, at 105 % of the best other's cost at most."""
    return fewer(results) and results[0].hours <= MOST_COST * best_other(results).hours


def table(board: Board) -> str:
    """Markdown."""
    head = [
        "trace",
        "policy",
        "minutes over capacity",
        f"events {board.over}",
        f"{board.unit}-hours",
        "of the best other's",
    ]
    head += ["actions", "most in 24 h", f"reversed within {board.calm:.0f} s"]
    rows = [
        f"| {' | '.join(head)} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for trace, results in board.results:
        best = best_other(results)
        for one in results:
            name = f"**{one.policy}**" if one is results[0] else one.policy
            cost = "the best other" if one is best else f"{one.hours / best.hours:.0%}"
            rows.append(
                f"| {trace} | {name} | {len(one.over):,} | {one.throttled:,.0f} | {one.hours:,.1f} | {cost} | "
                f"{len(one.actions)} | {one.busiest_day} | {one.reversals(board.calm)} |"
            )
    return "\n".join(rows)


def counts(board: Board) -> str:
    """Markdown: of many traces of a kind, on how many the goal holds, and by what it is missed."""
    head = [
        "traces",
        "goal holds",
        f"no fewer {board.over}",
        "dearer than 105 %",
        "ours of the best other's hours: median, most",
    ]
    rows = [f"| {' | '.join([*head, 'most actions in 24 h', 'reversed'])} |", "|---|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(_kind(trace) for trace, _ in board.results):
        found = [results for trace, results in board.results if _kind(trace) == kind]
        costs = sorted(results[0].hours / best_other(results).hours for results in found)
        rows.append(
            f"| {kind}, {len(found)} | {sum(map(holds, found))} | {sum(not fewer(one) for one in found)} | "
            f"{sum(cost > MOST_COST for cost in costs)} | {median(costs):.0%}, {costs[-1]:.0%} | "
            f"{max(one[0].busiest_day for one in found)} | {sum(one[0].reversals(board.calm) for one in found)} |"
        )
    return "\n".join(rows)


def _kind(trace: str) -> str:
    return trace.partition(" x")[0]


def plot(board: Board) -> str:
    """An SVG: a panel for each trace, what was asked for as a grey area, what each policy had as a line."""
    height = len(board.results) * (_HEIGHT + _GAP) + _TOP + 24
    size = f'viewBox="0 0 {_LEFT + _WIDTH + 16} {height}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
        _legend(board.unit),
    ]
    for number, (trace, results) in enumerate(board.results):
        parts.append(_panel(trace, results, _TOP + 24 + number * (_HEIGHT + _GAP)))
    return "\n".join([*parts, "</svg>", ""])


def _legend(unit: str) -> str:
    parts, x = [], _LEFT
    for name, colour in {f"{unit}s' worth of load": "#ced4da", **_COLOURS}.items():
        parts.append(f'<rect x="{x}" y="10" width="14" height="6" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="17">{name}</text>')
        x += 34 + 7 * len(name)
    return "\n".join(parts)


def _panel(trace: str, results: Sequence[Result], top: float) -> str:
    most = max(max(one.had) for one in results)
    minutes = len(results[0].asked)
    every = max(1, minutes // _POINTS)

    def place(minute: int, value: float) -> str:
        return f"{_LEFT + _WIDTH * minute / minutes:.1f},{top + _HEIGHT * (1 - value / most):.1f}"

    floor = f"{_LEFT + _WIDTH},{top + _HEIGHT} {_LEFT},{top + _HEIGHT}"
    area = " ".join(place(at, max(results[0].asked[at : at + every])) for at in range(0, minutes, every))
    parts = [
        f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{trace}, {minutes / 60:.0f} h</text>',
        f'<polygon points="{area} {floor}" fill="#ced4da"/>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{_LEFT - 6}" y="{top + _HEIGHT}" text-anchor="end">0</text>',
    ]
    for one in reversed(results):
        line = " ".join(place(at, max(one.had[at : at + every])) for at in range(0, minutes, every))
        width = 2 if one is results[0] else 1.2
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[one.policy]}" stroke-width="{width}"/>')
    return "\n".join(parts)
