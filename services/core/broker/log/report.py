"""What a check of a data folder found, in exact numbers."""

from dataclasses import dataclass, field

Range = tuple[int, int]
"""First and last offset."""


@dataclass(slots=True)
class PartitionReport:
    """One partition: offsets `start <= offset < end`; records that can be read; lost; lost earlier and noted by `repair`."""

    partition: int
    start: int
    end: int
    records: int = 0
    lost: list[Range] = field(default_factory=list)
    noted: list[Range] = field(default_factory=list)


@dataclass(slots=True)
class TopicReport:
    """One topic (or the groups, by the name "groups"). problems: what is wrong beside lost records, in words."""

    topic: str
    partitions: list[PartitionReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def lost_records(self) -> int:
        """How many records cannot be read and were not noted before."""
        return sum(last - first + 1 for part in self.partitions for first, last in part.lost)

    @property
    def is_sound(self) -> bool:
        """Nothing lost, nothing wrong."""
        return not self.problems and not self.lost_records


@dataclass(slots=True)
class FolderReport:
    """All topics and the groups of a data folder."""

    topics: list[TopicReport]
    groups: TopicReport

    @property
    def is_sound(self) -> bool:
        """Nothing lost, nothing wrong anywhere."""
        return self.groups.is_sound and all(topic.is_sound for topic in self.topics)
