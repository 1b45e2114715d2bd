"""What goes wrong at a modelled broker: windows of a few seconds in which calls to some topics fail, in one way or several.

Swarm testing (Groce, Zhang, Eide, Chen, Regehr: "Swarm Testing", ISSTA 2012): each history has only some kinds of faults, chosen
by its seed, for a history with all of them never gets deep into any.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from services.core.broker.errors import BrokerError, OutcomeUnknown, StorageFull, Throttled, Unavailable

KINDS = ("refused", "throttled", "full", "answer_lost", "never_arrived", "denied", "partial", "slow", "late")
"""refused, throttled, full: nothing is stored, and said so. answer_lost: stored, unknown to the caller. never_arrived: unknown
to the caller, not stored. late: unknown to the caller, stored seconds afterwards. denied: refused for a reason that no retry
mends, until somebody does. partial: the batch's end is refused. slow: seconds instead of milliseconds."""


@dataclass(frozen=True, slots=True)
class Window:
    """kinds: by turns of the dice, "ok" among them. topic: None for all."""

    until: float
    topic: str | None
    kinds: tuple[str, ...]
    reads: bool


class Weather:
    """The faults of one history. `calm` ends them all."""

    def __init__(self, rng: random.Random, now: Callable[[], float], kinds: tuple[str, ...]) -> None:
        self._rng, self._now, self.kinds = rng, now, kinds
        self._windows: list[Window] = []
        self.bitten = 0
        self.hidden_until: dict[str, float] = {}
        """When the last window ends in which a topic may not be readable; "" for all topics."""
        self._is_calm = False

    def begin(
        self, topic: str | None, seconds: float, *, reads: bool = False, kinds: tuple[str, ...] | None = None
    ) -> None:
        """A window from now on."""
        if self._is_calm:
            return
        if kinds is None:
            if not self.kinds:
                return
            kinds = (
                *self._rng.sample(self.kinds, min(len(self.kinds), self._rng.randint(1, 3))),
                *["ok"] * self._rng.randint(0, 2),
            )
        if reads:
            self.hidden_until[topic or ""] = max(self.hidden_until.get(topic or "", 0.0), self._now() + seconds)
        self._windows.append(Window(self._now() + seconds, topic, kinds, reads))

    def calm(self) -> None:
        """No fault from now on."""
        self._is_calm = True
        self._windows = []

    def draw(self, topic: str | None, *, writes: bool) -> str:
        """What becomes of this call: "ok" or one of KINDS."""
        if not self._windows:
            return "ok"
        now = self._now()
        self._windows = [one for one in self._windows if one.until > now]
        for one in self._windows:
            if (one.topic is None or one.topic == topic) and (writes or one.reads):
                kind = self._rng.choice(one.kinds)
                if kind != "ok":
                    self.bitten += 1
                    return kind
        return "ok"

    def delay(self, kind: str = "ok") -> float:
        """Seconds for one way."""
        if kind == "slow":
            return self._rng.uniform(0.2, 4.0)
        drawn = self._rng.random() * 3  # one draw: this is asked for most of all
        return 0.0 if drawn < 1 else 0.001 if drawn < 2 else 0.0005 + (drawn - 2) * 0.01


def refusal(kind: str, where: str) -> BrokerError:
    """What the caller hears."""
    match kind:
        case "throttled":
            return Throttled(f"{where}: too fast")
        case "full":
            return StorageFull(f"{where}: no room")
        case "denied":
            return BrokerError(f"{where}: access denied")
        case "answer_lost" | "never_arrived" | "late":
            return OutcomeUnknown(f"{where}: no answer")
        case _:
            return Unavailable(f"{where}: not now")
