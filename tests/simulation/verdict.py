"""What came of a history."""

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """What came of a seed. digest: of everything that happened. complaints: every way in which a promise was broken."""

    seed: int
    complaints: list[str] = field(default_factory=list)
    digest: str = ""
    figures: dict[str, int] = field(default_factory=dict)
