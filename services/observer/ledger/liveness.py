"""Which instances report for each step, how far behind they are, and which are silent.

All times are in ms of the observer's wall clock. A report was stored after the last time at which the observer had read
everything. The clock of a reporter is believed within the time that a report takes to be stored.
"""

import msgspec

from services.core.ledger.report import Backlog, Breaker, Report
from services.observer.ledger.flow import Step

SILENT_AFTER_MS = 30_000
"""Three heartbeats."""
STORED_WITHIN_MS = 30_000
"""The usual limit from when a report is made to when it is stored: a reporter that cannot store it makes another one."""
COMPARED = 4
"""The number of reports of an instance that show how late its clock is. A process or a disk that stood still delays one report.
A clock that was set back shows in those before and after it."""
GAP_MS = 15_000
"""An observer that reads nothing for longer than this receives nothing, so silence in that time does not count."""
TAKEOVER_MS = 120_000
"""Within this time another instance owns the work of a silent one, and reports for it."""
FORGET_AFTER_MS = 86_400_000
_WORST_FIRST: tuple[Breaker, ...] = ("open", "half-open", "closed")


class Heartbeat(msgspec.Struct, frozen=True):
    """The last report of one instance, as in `Report`.

    at_ms: by the reporter's clock; the other times are by ours. received_ms: when it was stored, rather too early; time in
    which the observer read nothing is added. made_ms: when it was made, rather too early. late_ms: of this report and the
    COMPARED - 1 before it, oldest first: the time of storage minus the reporter's time.
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

    def follows(self, known: "Heartbeat") -> bool:
        """Whether this report was stored after the other.

        Two with one time are parts of one report, or the second was made on behalf of a silent instance: it proves no later
        life, but may close the instance. An instance that was only slow has reported since, so it is not closed.
        """
        if self.at_ms == known.at_ms:
            return self._end() > known._end()
        if self.closed and self.at_ms < known.at_ms:
            return False
        return (self.received_ms, self.at_ms) > (known.received_ms, known.at_ms)

    def _end(self) -> tuple[bool, int]:
        return self.closed, -1 if self.behind_ms is None else self.behind_ms


def _made(at_ms: int, received_ms: int, known: Heartbeat | None) -> tuple[int, tuple[int, ...]]:
    """When a report was made, by our clock, and its `late_ms`.

    The first report of an instance is believed within STORED_WITHIN_MS; of later ones it is known how late the clock is.
    """
    before = () if known is None else known.late_ms
    if not received_ms:
        return 0, before
    if known is not None and before and at_ms == known.at_ms:  # another part of one report
        return min(known.made_ms, received_ms), before
    late_ms = (*before, received_ms - at_ms)[-COMPARED:]
    if not before:
        return min(max(at_ms, received_ms - STORED_WITHIN_MS), received_ms), late_ms
    return at_ms + min(late_ms), late_ms


class Liveness:
    """The last heartbeat of each instance of each step.

    stamped: `behind_ms` is the age of a time stamp of another clock with which the reporter's was compared, as on Kinesis. The
    retrier's always is: it says which events were due.
    """

    def __init__(self, *, stamped: bool = False) -> None:
        self._heartbeats: dict[Step, dict[str, Heartbeat]] = {}
        self._stamped = stamped

    def record(self, report: Report, received_ms: int) -> None:
        """Keep the report that was stored last. received_ms: a time before it was stored, by our clock; 0: unknown."""
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
        if known is None or heartbeat.follows(known):
            heartbeats[report.instance] = heartbeat

    def load(self, heartbeats: dict[Step, dict[str, Heartbeat]]) -> None:
        """Replace what is known by the heartbeats of a snapshot."""
        self._heartbeats = heartbeats

    def listened(self, since: int, until: int) -> None:
        """Everything stored before `since` had been read, and now everything stored before `until`.

        When the time between was long, it counts as no silence. `until` may be earlier: the clock was set back.
        """
        if 0 <= until - since <= GAP_MS:
            return
        for heartbeats in self._heartbeats.values():
            for name, one in heartbeats.items():
                if one.received_ms > until:
                    heartbeats[name] = msgspec.structs.replace(one, received_ms=until, made_ms=min(one.made_ms, until))
                elif since - SILENT_AFTER_MS <= one.received_ms <= since:
                    heartbeats[name] = msgspec.structs.replace(one, received_ms=one.received_ms + until - since)

    def heartbeats(self) -> dict[Step, dict[str, Heartbeat]]:
        """All; not to be changed."""
        return self._heartbeats

    def alive(self, step: Step, now: int) -> list[str]:
        """The instances that report for this step."""
        return [
            name
            for name, heartbeat in self._heartbeats.get(step, {}).items()
            if not heartbeat.closed and now - heartbeat.received_ms <= SILENT_AFTER_MS
        ]

    def behind_ms(self, step: Step, now: int) -> int | None:
        """How far behind the slowest instance is; None when it is unknown."""
        known = [heartbeat.behind_ms for heartbeat in self._counted(step, now) if heartbeat.behind_ms is not None]
        return max(known, default=None)

    def breaker(self, step: Step, now: int) -> Breaker | None:
        """The worst breaker of its live instances; None when none of them reported one."""
        heartbeats = self._heartbeats.get(step, {})
        reported = {heartbeats[name].breaker for name in self.alive(step, now)}
        return next((state for state in _WORST_FIRST if state in reported), None)

    def why_not_done(self, step: Step, until: int, now: int) -> str | None:
        """Why the step may not have processed everything older than `until`; None when it has."""
        if not self.alive(step, now):
            return f"{step.label} is silent"
        for heartbeat in self._counted(step, now):
            if heartbeat.behind_ms is None:
                return f"{step.label} does not know how far behind it is"
            if self._done(step, heartbeat, heartbeat.behind_ms) < until:
                if heartbeat.closed:
                    return f"an instance of {step.label} stopped before it had processed everything"
                if now - heartbeat.received_ms > SILENT_AFTER_MS:
                    return f"an instance of {step.label} fell silent"
                if heartbeat.received_ms - heartbeat.behind_ms >= until:
                    return f"{step.label} has not reported since the minute ended"
                return f"{step.label} is behind by {heartbeat.behind_ms / 1000:.0f} s"
        return None

    def done_up_to(self, step: Step, now: int, backlog: Backlog = "sources") -> int | None:
        """A time (ms) before which everything of this backlog is processed; None when it is unknown."""
        if not self.alive(step, now):
            return None
        done = []
        for one in self._counted(step, now):
            behind = {"sources": one.behind_ms, "returned": one.returned_ms, "held": one.held_ms}[backlog]
            if behind is None:
                return None
            done.append(self._done(step, one, behind))
        return min(done, default=None)

    def _done(self, step: Step, heartbeat: Heartbeat, behind: int) -> int:
        if self._stamped or step.node == "retrier":
            return min(heartbeat.made_ms, heartbeat.at_ms - behind)
        return heartbeat.made_ms - behind

    def _counted(self, step: Step, now: int) -> list[Heartbeat]:
        """Of live instances, and of those that are gone for so short a time that their work may have no new owner yet."""
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
        """Drop the heartbeats that are older than a day."""
        kept = {
            step: {name: one for name, one in heartbeats.items() if now - one.received_ms <= FORGET_AFTER_MS}
            for step, heartbeats in self._heartbeats.items()
        }
        self._heartbeats = {step: heartbeats for step, heartbeats in kept.items() if heartbeats}
