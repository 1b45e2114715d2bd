"""Which instances report for each step, how far behind they are, and which fell silent.

All by the observer's clock. A report was stored after the last time at which the observer had read everything. A reporter's own
clock is trusted within the time that a report takes to arrive.
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
or a disk, is reported from a clock that was set back by those before and behind it."""
GAP_MS = 15_000
"""Who reads nothing for so long hears nobody: that is no silence of theirs."""
TAKEOVER_MS = 120_000
"""Within this time somebody else owns what a silent instance did, and speaks of it."""
FORGET_AFTER_MS = 86_400_000
_WORST_FIRST: tuple[Breaker, ...] = ("open", "half-open", "closed")


class Heartbeat(msgspec.Struct, frozen=True):
    """The last report of one instance, as in `Report`.

    at_ms: by the reporter's clock; the others are by ours. made_ms: when it was made, rather too early. received_ms: when it was
    stored, rather too early; time in which nothing was read is added. late_ms: how much later than by its own clock this and the
    COMPARED - 1 before it were stored, the oldest first.
    """

    at_ms: int
    behind_ms: int | None
    closed: bool
    breaker: Breaker | None = None
    returned_ms: int | None = None
    received_ms: int = msgspec.field(default=0, name="heard_ms")
    made_ms: int = 0
    late_ms: tuple[int, ...] = ()
    held_ms: int | None = None

    def behind_with(self, backlog: "Backlog") -> int | None:
        """How far, in ms."""
        return {"sources": self.behind_ms, "returned": self.returned_ms, "held": self.held_ms}[backlog]


Backlog = Literal["sources", "returned", "held"]
"""Of what: what comes first; what the retrier gave back; all that comes back, as in `Report`."""


def _follows(heartbeat: Heartbeat, known: Heartbeat) -> bool:
    """In the order in which they were stored.

    Two of one time are parts of one report, or the second was made in the name of one that fell silent: it speaks no later for
    that, but may have left. One that was only slow has not: it spoke again before that goodbye.
    """
    if heartbeat.at_ms == known.at_ms:
        return _end(heartbeat) > _end(known)
    if heartbeat.closed and heartbeat.at_ms < known.at_ms:
        return False
    return (heartbeat.received_ms, heartbeat.at_ms) > (known.received_ms, known.at_ms)


def _made(at_ms: int, received_ms: int, known: Heartbeat | None) -> tuple[int, tuple[int, ...]]:
    """When a report was made, by our clock, and `Heartbeat.late_ms`.

    The first one of an instance is believed within TOLD_MS; of later ones it is known how late the clock is.
    """
    before = () if known is None else known.late_ms
    if not received_ms:
        return 0, before
    if known is not None and before and at_ms == known.at_ms:  # another part of one report
        return min(known.made_ms, received_ms), before
    late_ms = (*before, received_ms - at_ms)[-COMPARED:]
    if not before:
        return min(max(at_ms, received_ms - TOLD_MS), received_ms), late_ms
    return at_ms + min(late_ms), late_ms


def _end(heartbeat: Heartbeat) -> tuple[bool, int]:
    return heartbeat.closed, -1 if heartbeat.behind_ms is None else heartbeat.behind_ms


class Liveness:
    """The last heartbeat of each instance of each step. All times in ms of our wall clock.

    stamped: what a reporter is behind by is the age of a stamp of another clock, which its own was compared with, as on Kinesis.
    The retrier's always is: it says what was due.
    """

    def __init__(self, *, stamped: bool = False) -> None:
        self._heartbeats: dict[Step, dict[str, Heartbeat]] = {}
        self._stamped = stamped

    def record(self, report: Report, received_ms: int) -> None:
        """Keep the last that was stored. received_ms: by our clock, a time before it was stored; 0: nobody knows."""
        heartbeats = self._heartbeats.setdefault(Step(report.node, report.pipe, report.destination), {})
        known = heartbeats.get(report.instance)
        made_ms, late_ms = _made(report.at_ms, received_ms, known)
        heartbeat = Heartbeat(
            report.at_ms,
            report.behind_ms,
            report.closed,
            report.breaker,
            report.returned_ms,
            received_ms,
            made_ms,
            late_ms,
            report.held_ms,
        )
        if known is None or _follows(heartbeat, known):
            heartbeats[report.instance] = heartbeat

    def load(self, heartbeats: dict[Step, dict[str, Heartbeat]]) -> None:
        """Instead of what is known, those of a snapshot."""
        self._heartbeats = heartbeats

    def listened(self, since: int, until: int) -> None:
        """Everything that was stored before `since`, and then before `until`, was read.

        After a longer while nobody is silent for that alone. It may be earlier: a clock that was set back.
        """
        if 0 <= until - since <= GAP_MS:
            return
        for heartbeats in self._heartbeats.values():
            for name, heartbeat in heartbeats.items():
                if heartbeat.received_ms > until:
                    heartbeats[name] = msgspec.structs.replace(
                        heartbeat, received_ms=until, made_ms=min(heartbeat.made_ms, until)
                    )
                elif since - SILENT_AFTER_MS <= heartbeat.received_ms <= since:
                    heartbeats[name] = msgspec.structs.replace(
                        heartbeat, received_ms=heartbeat.received_ms + until - since
                    )

    def heartbeats(self) -> dict[Step, dict[str, Heartbeat]]:
        """All; not to be changed."""
        return self._heartbeats

    def alive(self, step: Step, now: int) -> list[str]:
        """The instances that report for this step."""
        heartbeats = self._heartbeats.get(step, {})
        return [
            name
            for name, heartbeat in heartbeats.items()
            if not heartbeat.closed and now - heartbeat.received_ms <= SILENT_AFTER_MS
        ]

    def is_alive(self, step: Step, now: int) -> bool:
        """Whether any instance does."""
        return bool(self.alive(step, now))

    def behind_ms(self, step: Step, now: int) -> int | None:
        """How far behind the slowest instance is; None when it is unknown."""
        known = [heartbeat.behind_ms for heartbeat in self._speaking(step, now) if heartbeat.behind_ms is not None]
        return max(known, default=None)

    def breaker(self, step: Step, now: int) -> Breaker | None:
        """The worst breaker of its live instances; None when none of them reported one."""
        heartbeats = self._heartbeats.get(step, {})
        reported = {heartbeats[name].breaker for name in self.alive(step, now)}
        return next((state for state in _WORST_FIRST if state in reported), None)

    def why_not_done(self, step: Step, until: int, now: int) -> str | None:
        """Why the step may not have processed everything older than `until`; None when it has."""
        name = step.node if step.destination is None else f"{step.node} to {step.destination}"
        if not self.is_alive(step, now):
            return f"{name} is silent"
        for heartbeat in self._speaking(step, now):
            if heartbeat.behind_ms is None:
                return f"{name} does not know how far behind it is"
            if self._done(step, heartbeat, heartbeat.behind_ms) < until:
                if heartbeat.closed:
                    return f"an instance of {name} stopped before it had processed everything"
                if now - heartbeat.received_ms > SILENT_AFTER_MS:
                    return f"an instance of {name} fell silent"
                if heartbeat.received_ms - heartbeat.behind_ms >= until:
                    return f"{name} has not reported since the minute ended"
                return f"{name} is behind by {heartbeat.behind_ms / 1000:.0f} s"
        return None

    def done_up_to(self, step: Step, now: int, backlog: Backlog = "sources") -> int | None:
        """A time (ms) before which everything of this backlog is processed; None when nobody knows."""
        if not self.is_alive(step, now):
            return None
        done = []
        for heartbeat in self._speaking(step, now):
            behind = heartbeat.behind_with(backlog)
            if behind is None:
                return None
            done.append(self._done(step, heartbeat, behind))
        return min(done, default=None)

    def _done(self, step: Step, heartbeat: Heartbeat, behind: int) -> int:
        if self._stamped or step.node == "retrier":
            return min(heartbeat.made_ms, heartbeat.at_ms - behind)
        return heartbeat.made_ms - behind

    def _speaking(self, step: Step, now: int) -> list[Heartbeat]:
        """Heartbeats of instances that are alive, or gone for so short a time that their work may have no new owner yet."""
        return [
            heartbeat
            for heartbeat in self._heartbeats.get(step, {}).values()
            if now - heartbeat.received_ms <= TAKEOVER_MS and (heartbeat.behind_ms or not heartbeat.closed)
        ]

    def fallen_silent(self, step: Step, now: int) -> dict[str, Heartbeat]:
        """Instances that do not report any more, and whose last report was not closed."""
        return {
            instance: heartbeat
            for instance, heartbeat in self._heartbeats.get(step, {}).items()
            if not heartbeat.closed and now - heartbeat.received_ms > SILENT_AFTER_MS
        }

    def has_reported(self, step: Step, until: int) -> bool:
        """Whether each instance that is not closed has reported after this time."""
        return all(
            heartbeat.closed or heartbeat.made_ms >= until for heartbeat in self._heartbeats.get(step, {}).values()
        )

    def forget(self, now: int) -> None:
        """Drop the heartbeats of those that said goodbye, or nothing, a day ago."""
        for heartbeats in self._heartbeats.values():
            for instance in [
                name for name, heartbeat in heartbeats.items() if now - heartbeat.received_ms > FORGET_AFTER_MS
            ]:
                del heartbeats[instance]
        self._heartbeats = {step: heartbeats for step, heartbeats in self._heartbeats.items() if heartbeats}
