"""What is known of a group at one moment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance. age: seconds since its process began; cpu: cores used on average since the last look.

    age and cpu are None while they are not known: it does not answer, or was not looked at twice yet.
    """

    name: str
    ready: bool
    age: float | None
    cpu: float | None
    leaving: bool = False
    """It drains, or was told to."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at a group.

    size: how many instances the platform was told to run.
    lag: age in seconds of the oldest event that waits although its receiver works; None when it is not known.
    pressure: work that came in per work done, 1.0 when the group keeps pace.
    under_way: a deploy or a rebalance that must not be disturbed, for a person; None when there is none.
    """

    size: int
    instances: tuple[Instance, ...]
    lag: float | None = None
    pressure: float = 1.0
    under_way: str | None = None
