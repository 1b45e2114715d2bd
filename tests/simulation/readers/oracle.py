"""What the groups of a reading history must have got: every record that was stored for good, none that was rolled back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Event:
    """One record. life: of its topic. line: within it, records are read in the order of their offsets (a partition or shard).

    state: waiting (no reader may have it yet, and it may be cut off), stored, gone (lost by what the world did: whoever has not
    read it need not), forbidden (rolled back, or cut off before anybody could read it: nobody may read it).
    """

    number: int
    topic: str
    life: int
    line: int
    offset: int
    state: str = "waiting"
    is_old: bool = False
    """Stored before groups with the start "latest" began."""


@dataclass
class Oracle:
    """All records, and who read which of them first in which order."""

    events: list[Event] = field(default_factory=list)
    seen: dict[str, dict[int, int]] = field(default_factory=dict)
    """By group: how often each record was processed."""
    complaints: list[str] = field(default_factory=list)
    unordered: set[tuple[str, int, int]] = field(default_factory=set)
    """Topic, life and line of logs that were cut off below what somebody had read: first arrivals may go back."""
    harmed: set[tuple[str, int]] = field(default_factory=set)
    """Topic and line of logs in which records became unreadable, or that retention shortened."""
    displaced: set[str] = field(default_factory=set)
    """Groups that lost a position."""
    _last: dict[tuple[str, str, int, int], int] = field(default_factory=dict)
    repeated: int = 0

    def issue(self, topic: str, life: int, line: int, offset: int) -> Event:
        """A record that is written now."""
        event = Event(len(self.events), topic, life, line, offset)
        self.events.append(event)
        return event

    def of(self, topic: str, life: int, line: int | None = None) -> Iterable[Event]:
        """The records of one life of a topic, or of one of its partitions."""
        return (one for one in self.events if (one.topic, one.life) == (topic, life) and line in (None, one.line))

    def lose(self, events: Iterable[Event], is_lost: Callable[[Event], bool] = lambda _event: True) -> None:
        """These are not there any more."""
        for event in events:
            if is_lost(event):
                if event.state == "stored":
                    event.state = "gone"
                elif event.state == "waiting":
                    event.state = "forbidden"

    def process(self, group: str, number: int) -> None:
        """A member of the group has processed a record."""
        event, seen = self.events[number], self.seen.setdefault(group, {})
        seen[number] = seen.get(number, 0) + 1
        if seen[number] > 1:
            self.repeated += 1
            return
        if event.state in ("waiting", "forbidden"):
            self.complaints.append(f"{group} read e{number}, which was {event.state}")
        line = (event.topic, event.life, event.line)
        last = self._last.get((group, *line), -1)
        if event.offset < last and line not in self.unordered and not event.is_old:
            self.complaints.append(f"{group} read e{number} at {event.offset} of {line} first behind {last}")
        self._last[group, *line] = max(last, event.offset)

    def stop(self, group: str, topic: str, line: int | None) -> None:
        """A member waits for a person in this partition; line: None when it is not known which one it is."""
        is_lost = any(one.topic == topic and line in (None, one.line) and one.state == "gone" for one in self.events)
        if not is_lost and group not in self.displaced and (topic, line) not in self.harmed:
            self.complaints.append(f"{group} stopped at {topic}[{line}], where nothing is missing")

    def missing(self, groups: Mapping[str, object]) -> dict[str, list[int]]:
        """By group what it has still to get. groups: their starts."""
        found = {}
        for group, start in groups.items():
            seen = self.seen.get(group, {})
            left = [
                one.number
                for one in self.events
                if one.state == "stored" and one.number not in seen and not (start == "latest" and one.is_old)
            ]
            if left:
                found[group] = left
        return found
