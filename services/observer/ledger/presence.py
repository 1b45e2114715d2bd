"""Who speaks for each step, how far behind it is, and who fell silent.

By our own clock: when a report was stored at the earliest is known from when we had read all there was. What a reporter's clock
says is believed within the time that a report may take from there to here.
"""

from typing import Literal

import msgspec

from services.core.ledger.report import Breaker, Report
from services.observer.ledger.flow import Step

SILENT_AFTER_MS = 30_000
"""Three heartbeats."""
TOLD_MS = 30_000
"""From when a report is made to when it is stored, mostly: who cannot tell for so long makes another one."""
COMPARED = 4
"""So many reports of an instance are compared to know how late its clock is. One that was held up, by a process that stood still
or a disk, is told from a clock that was set back by those before and behind it."""
GAP_MS = 15_000
"""Who reads nothing for so long hears nobody: that is no silence of theirs."""
TAKEOVER_MS = 120_000
"""Within this time somebody else owns what a silent instance did, and speaks of it."""
FORGET_AFTER_MS = 86_400_000
_WORST_FIRST: tuple[Breaker, ...] = ("open", "half-open", "closed")


class Word(msgspec.Struct, frozen=True):
    """The last report of one instance, as in `Report`.

    at_ms: by the reporter's clock; the others are by ours. made_ms: when it was made, rather too early. heard_ms: when it was
    stored, rather too early; time in which nothing was read is added. late_ms: how much later than by its own clock this and the
    COMPARED - 1 before it were stored, the oldest first.
    """

    at_ms: int
    behind_ms: int | None
    closed: bool
    breaker: Breaker | None = None
    returned_ms: int | None = None
    heard_ms: int = 0
    made_ms: int = 0
    late_ms: tuple[int, ...] = ()
    held_ms: int | None = None

    def behind_with(self, backlog: "Backlog") -> int | None:
        """How far, in ms."""
        return {"sources": self.behind_ms, "returned": self.returned_ms, "held": self.held_ms}[backlog]


Backlog = Literal["sources", "returned", "held"]
"""Of what: what comes first; what the retrier gave back; all that comes back, as in `Report`."""


def _follows(word: Word, known: Word) -> bool:
    """In the order in which they were stored.

    Two of one time are parts of one report, or the second was made in the name of one that fell silent: it speaks no later for
    that, but may have left. One that was only slow has not: it spoke again before that goodbye.
    """
    if word.at_ms == known.at_ms:
        return _end(word) > _end(known)
    if word.closed and word.at_ms < known.at_ms:
        return False
    return (word.heard_ms, word.at_ms) > (known.heard_ms, known.at_ms)


def _made(at_ms: int, heard_ms: int, known: Word | None) -> tuple[int, tuple[int, ...]]:
    """When a report was made, by our clock, and `Word.late_ms`.

    The first one of an instance is believed within TOLD_MS; of later ones it is known how late the clock is.
    """
    before = () if known is None else known.late_ms
    if not heard_ms:
        return 0, before
    if known is not None and before and at_ms == known.at_ms:  # another part of one report
        return min(known.made_ms, heard_ms), before
    late_ms = (*before, heard_ms - at_ms)[-COMPARED:]
    if not before:
        return min(max(at_ms, heard_ms - TOLD_MS), heard_ms), late_ms
    return at_ms + min(late_ms), late_ms


def _end(word: Word) -> tuple[bool, int]:
    return word.closed, -1 if word.behind_ms is None else word.behind_ms


class Presence:
    """The last word of each instance of each step. All times in ms of our wall clock.

    stamped: what a reporter is behind by is the age of a stamp of another clock, which its own was compared with, as on Kinesis.
    The retrier's always is: it says what was due.
    """

    def __init__(self, *, stamped: bool = False) -> None:
        self._words: dict[Step, dict[str, Word]] = {}
        self._stamped = stamped

    def hear(self, report: Report, heard_ms: int) -> None:
        """Keep the last that was stored. heard_ms: by our clock, a time before it was stored; 0: nobody knows."""
        words = self._words.setdefault(Step(report.node, report.pipe, report.destination), {})
        known = words.get(report.instance)
        made_ms, late_ms = _made(report.at_ms, heard_ms, known)
        word = Word(
            report.at_ms,
            report.behind_ms,
            report.closed,
            report.breaker,
            report.returned_ms,
            heard_ms,
            made_ms,
            late_ms,
            report.held_ms,
        )
        if known is None or _follows(word, known):
            words[report.instance] = word

    def load(self, words: dict[Step, dict[str, Word]]) -> None:
        """Instead of what is known, those of a snapshot."""
        self._words = words

    def listened(self, since: int, until: int) -> None:
        """Everything that was stored before `since`, and then before `until`, was read.

        After a longer while nobody is silent for that alone. It may be earlier: a clock that was set back.
        """
        if 0 <= until - since <= GAP_MS:
            return
        for words in self._words.values():
            for name, word in words.items():
                if word.heard_ms > until:
                    words[name] = msgspec.structs.replace(word, heard_ms=until, made_ms=min(word.made_ms, until))
                elif since - SILENT_AFTER_MS <= word.heard_ms <= since:
                    words[name] = msgspec.structs.replace(word, heard_ms=word.heard_ms + until - since)

    def words(self) -> dict[Step, dict[str, Word]]:
        """All; not to be changed."""
        return self._words

    def alive(self, step: Step, now: int) -> list[str]:
        """The instances that speak for this step."""
        words = self._words.get(step, {})
        return [name for name, word in words.items() if not word.closed and now - word.heard_ms <= SILENT_AFTER_MS]

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
            if self._done(step, word, word.behind_ms) < until:
                if word.closed:
                    return f"an instance of {name} left before it was done"
                if now - word.heard_ms > SILENT_AFTER_MS:
                    return f"an instance of {name} fell silent"
                if word.heard_ms - word.behind_ms >= until:
                    return f"{name} has not spoken since the minute was over"
                return f"{name} is behind by {word.behind_ms / 1000:.0f} s"
        return None

    def done_up_to(self, step: Step, now: int, backlog: Backlog = "sources") -> int | None:
        """A time (ms) before which everything of this backlog is processed; None when nobody knows."""
        if not self.is_alive(step, now):
            return None
        done = []
        for word in self._speaking(step, now):
            behind = word.behind_with(backlog)
            if behind is None:
                return None
            done.append(self._done(step, word, behind))
        return min(done, default=None)

    def _done(self, step: Step, word: Word, behind: int) -> int:
        if self._stamped or step.node == "retrier":
            return min(word.made_ms, word.at_ms - behind)
        return word.made_ms - behind

    def _speaking(self, step: Step, now: int) -> list[Word]:
        """Those whose word counts: alive, or gone for so short a time that nobody may have taken over what they had not done."""
        return [
            word
            for word in self._words.get(step, {}).values()
            if now - word.heard_ms <= TAKEOVER_MS and (word.behind_ms or not word.closed)
        ]

    def fallen_silent(self, step: Step, now: int) -> dict[str, Word]:
        """Instances that neither speak nor said goodbye."""
        return {
            instance: word
            for instance, word in self._words.get(step, {}).items()
            if not word.closed and now - word.heard_ms > SILENT_AFTER_MS
        }

    def has_told(self, step: Step, until: int) -> bool:
        """Whether everybody who did not say goodbye spoke after this time."""
        return all(word.closed or word.made_ms >= until for word in self._words.get(step, {}).values())

    def forget(self, now: int) -> None:
        """Drop the words of those that said goodbye, or nothing, a day ago."""
        for words in self._words.values():
            for instance in [name for name, word in words.items() if now - word.heard_ms > FORGET_AFTER_MS]:
                del words[instance]
        self._words = {step: words for step, words in self._words.items() if words}
