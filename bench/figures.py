"""A measured figure beside its floor: the ratio is what survives a noisy machine."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` in `unit`, lower is better. goal: the highest ratio to `floor` allowed, or the highest value without one."""

    name: str
    value: float
    unit: str
    goal: float
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        """value / floor."""
        return None if self.floor is None else self.value / self.floor

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return (self.value if self.ratio is None else self.ratio) <= self.goal

    def as_json(self) -> dict[str, object]:
        """One element of `make bench ARGS=--json`."""
        ratio = None if self.ratio is None else round(self.ratio, 3)
        return {
            "name": self.name,
            "value": round(self.value, 3),
            "unit": self.unit,
            "floor": None if self.floor is None else round(self.floor, 3),
            "ratio": ratio,
            "goal": self.goal,
            "holds": self.holds,
        }


def print_figures(figures: list[Figure]) -> None:
    """A table for people."""
    table = Table(title="Measured beside floors, one run, one machine")
    for column in ("figure", "measured", "unit", "floor", "ratio", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "unit", "") else "right")
    for figure in figures:
        floor = "" if figure.floor is None else f"{figure.floor:.2f}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        verdict = "[green]holds[/]" if figure.holds else "[red]short[/]"
        table.add_row(figure.name, f"{figure.value:.2f}", figure.unit, floor, ratio, f"≤ {figure.goal:g}", verdict)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)
