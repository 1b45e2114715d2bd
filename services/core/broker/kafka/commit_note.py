"""What travels with every commit as its metadata, for whoever owns the partition next.

partitions: how many the topic had when the group began. topic: the id of the topic that was read: a name can be given to
another topic later, and a commit that was on its way then says nothing about that one. epoch: of the leader that wrote the
last processed record: it tells whether the log was cut off below the commit since (see `leader_epochs`).
"""

import re
from typing import NamedTuple, Self

_PART = re.compile(r"(partitions|topic|epoch)=([0-9a-zA-Z-]{1,40})")


class CommitNote(NamedTuple):
    """None, "": not known, because an administrator or an older version made the commit."""

    partitions: int | None = None
    topic: str = ""
    epoch: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Whatever is not understood is left out: others commit with metadata of their own."""
        found = {part[1]: part[2] for part in map(_PART.fullmatch, text.split(";")) if part}
        partitions, epoch = found.get("partitions", ""), found.get("epoch", "")
        return cls(
            int(partitions) if partitions.isdecimal() else None,
            found.get("topic", ""),
            int(epoch) if epoch.isdecimal() else None,
        )

    def __str__(self) -> str:
        parts = {"partitions": self.partitions, "topic": self.topic or None, "epoch": self.epoch}
        return ";".join(f"{name}={value}" for name, value in parts.items() if value is not None)
