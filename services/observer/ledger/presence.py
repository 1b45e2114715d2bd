"""Who speaks for each step, how far behind it is, and who fell silent."""

import msgspec

from services.core.ledger.report import Breaker, Report
from services.observer.ledger.flow import Step

SILENT_AFTER_MS = 30_000
"""Three heartbeats."""
TAKEOVER_MS = 120_000
"""Within this time somebody else owns what a silent instance did, and speaks of it."""
FORGET_AFTER_MS = 86_400_000
_WORST_FIRST: tuple[Breaker, ...] = ("open", "half-open", "closed")


class Word(msgspec.Struct, frozen=True):
    """The last report of one instance, as in `Report`."""

    at_ms: int
    behind_ms: int | None
    closed: bool
    breaker: Breaker | None = None


def _order(word: Word) -> tuple[int, bool, int]:
    return word.at_ms, word.closed, -1 if word.behind_ms is None else word.behind_ms


class Presence:
    """The last word of each instance of each step. All times in ms of the wall clock."""

    def __init__(self, words: dict[Step, dict[str, Word]] | None = None) -> None:
        self._words = words if words is not None else {}

    def hear(self, report: Report) -> None:
        """Keep the newest, in whatever order they come."""
        words = self._words.setdefault(Step(report.node, report.pipe, report.destination), {})
        word = Word(report.at_ms, report.behind_ms, report.closed, report.breaker)
        known = words.get(report.instance)
        if known is None or _order(word) > _order(known):
            words[report.instance] = word

    def words(self) -> dict[Step, dict[str, Word]]:
        """All; not to be changed."""
        return self._words

    def alive(self, step: Step, now: int) -> list[str]:
        """The instances that speak for this step."""
        words = self._words.get(step, {})
        return [name for name, word in words.items() if not word.closed and now - word.at_ms <= SILENT_AFTER_MS]

    def is_alive(self, step: Step, now: int) -> bool:
        """Whether any instance does."""
        return bool(self.alive(step, now))

    def behind_ms(self, step: Step, now: int) -> int | None:
        """How far behind the slowest instance is; None when nobody knows."""
        known = [word.behind_ms for word in self._speaking(step, now) if word.behind_ms is not None]
        return max(known, default=None)

    def breaker(self, step: Step, now: int) -> Breaker | None:
        """The worst of its instances' breakers; None when nobody who is alive told of one."""
        words = self._words.get(step, {})
        told = {words[name].breaker for name in self.alive(step, now)}
        return next((state for state in _WORST_FIRST if state in told), None)

    def why_not_done(self, step: Step, until: int, now: int) -> str | None:
        """Why the step may not have processed everything older than `until`; None when it has."""
        name = step.node if step.destination is None else f"{step.node} to {step.destination}"
        if not self.is_alive(step, now):
            return f"{name} is silent"
        for word in self._speaking(step, now):
            if word.behind_ms is None:
                return f"{name} does not know how far behind it is"
            if word.at_ms - word.behind_ms < until:
                silent = now - word.at_ms > SILENT_AFTER_MS
                return (
                    f"an instance of {name} fell silent"
                    if silent
                    else f"{name} is behind by {word.behind_ms / 1000:.0f} s"
                )
        return None

    def _speaking(self, step: Step, now: int) -> list[Word]:
        """Those whose word counts: alive, or silent for so short a time that nobody may have taken over."""
        return [
            word for word in self._words.get(step, {}).values() if not word.closed and now - word.at_ms <= TAKEOVER_MS
        ]

    def fallen_silent(self, step: Step, now: int) -> dict[str, Word]:
        """Instances that neither speak nor said goodbye."""
        return {
            instance: word
            for instance, word in self._words.get(step, {}).items()
            if not word.closed and now - word.at_ms > SILENT_AFTER_MS
        }

    def forget(self, now: int) -> None:
        """Drop the words of those that said goodbye, or nothing, a day ago."""
        for words in self._words.values():
            for instance in [name for name, word in words.items() if now - word.at_ms > FORGET_AFTER_MS]:
                del words[instance]
        self._words = {step: words for step, words in self._words.items() if words}
