"""One stream's notes: which updates were made, by whomever of us. Another autoscaler's are counted, and never written over."""

from dataclasses import replace

from services.autoscaler.shards.figures import StreamMemory, Update
from services.autoscaler.shards.memory import UPDATES, read_memory, write_day, write_updates
from services.core.broker.resharding import Resharding

_SAME_S = 5.0
"""Less lies between no two updates."""


class Notes:
    """Raises BrokerError kinds. now: by the clock of decisions; ahead: the wall clock of it."""

    def __init__(self, resharding: Resharding, topic: str) -> None:
        self._resharding, self._topic = resharding, topic
        self._known: set[str] = set()

    async def read(self, now: float, ahead: float) -> StreamMemory:
        """All of it."""
        texts = await self._resharding.notes(self._topic)
        self._known = set(texts.get(UPDATES, "").split())
        return read_memory(texts, now, ahead)

    async def news(self, memory: StreamMemory, now: float, ahead: float) -> tuple[Update, ...]:
        """Updates that neither were read before nor written here, nor are in the memory."""
        words = (await self._resharding.notes(self._topic)).get(UPDATES, "").split()
        unknown = [word for word in words if word not in self._known]
        self._known.update(unknown)
        found = read_memory({UPDATES: " ".join(unknown)}, now, ahead).updates
        # After a step of the clock another autoscaler writes ours with another time.
        return tuple(one for one in found if all(abs(one.at - old.at) > _SAME_S for old in memory.updates))

    async def write_updates(self, memory: StreamMemory, ahead: float) -> None:
        """In place of those that stand there."""
        texts = write_updates(memory, ahead)
        self._known.update(texts[UPDATES].split())  # before: of a request without an answer nobody knows what it did
        await self._resharding.note(self._topic, texts)
        self._known = set(texts[UPDATES].split())

    async def write_day(self, memory: StreamMemory) -> None:
        """In place of the pattern that stands there."""
        await self._resharding.note(self._topic, write_day(memory))


def with_updates(memory: StreamMemory, found: tuple[Update, ...]) -> StreamMemory:
    """With these, too, in their order."""
    return replace(memory, updates=tuple(sorted((*memory.updates, *found), key=lambda one: one.at)))
