"""The damage table: how many positions of each file were damaged and what the log said, printed at the end of a test run."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

PROPERTY = "damage_row"
HEAD = f"{'file':<24} {'damage':<8} {'positions':>9} {'harmless':>9} {'loud':>7} {'silent':>7}"

RecordProperty = Callable[[str, object], None]


@dataclass
class Damaged:
    """One file. harmless: everything was still there, intact. loud: each record came intact or was named as lost."""

    file: str
    damage: str
    positions: int
    harmless: int = 0
    loud: int = 0

    def count(self, outcome: str) -> None:
        """One position: "harmless" or "loud"."""
        setattr(self, outcome, getattr(self, outcome) + 1)

    def text(self) -> str:
        """One line under HEAD. What is neither harmless nor loud fails the test, and would stand under silent."""
        silent = self.positions - self.harmless - self.loud
        return f"{self.file:<24} {self.damage:<8} {self.positions:>9} {self.harmless:>9} {self.loud:>7} {silent:>7}"

    def as_property(self) -> tuple[str, object]:
        """For a test's `record_property`; travels from worker to controller."""
        return PROPERTY, asdict(self)


def table(rows: Iterable[Damaged]) -> list[str]:
    """All lines: what is of the same file and damage is one, and a sum."""
    lines: dict[tuple[str, str], Damaged] = {}
    for row in sorted(rows, key=lambda row: (row.file, row.damage)):
        for key in ((row.file, row.damage), ("~", "")):
            line = lines.setdefault(key, Damaged(*key, 0))
            line.positions += row.positions
            line.harmless += row.harmless
            line.loud += row.loud
    lines["~", ""].file = "all"
    return [HEAD, *(lines[key].text() for key in sorted(lines))]
