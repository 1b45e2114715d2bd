"""What came of it: tables in Markdown, a plot as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulator.result import Result

_COLOURS = {
    "Penstock": "#d6336c",
    "Kubernetes HPA": "#1c7ed6",
    "AWS target tracking": "#f08c00",
    "fixed thresholds": "#2f9e44",
}
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


def holds(results: Sequence[Result]) -> bool:
    """The goal: fewer events over capacity than the best other (or none, as it), at 105 % of its cost at most."""
    ours, best = results[0], best_other(results)
    fewer = ours.throttled < best.throttled or ours.throttled == 0
    return fewer and ours.hours <= 1.05 * best.hours


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
