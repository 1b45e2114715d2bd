"""What every backend's world offers to a reading history: topics, writers, faults, and a way for the real code to connect."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from services.core.broker.contract import Broker
from tests.simulation.machine import Machine, Process
from tests.simulation.readers.oracle import Oracle


class World(ABC):
    """One backend's servers, disks and writers. faults: what `strike` understands. away: what needs that nobody is a member."""

    faults: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    record_bytes = 1
    """Of each record, and a few more."""
    largest_batch = 0
    """Of those that it writes, in bytes, and a little more."""
    expires = False
    """Whether commits expire: then a group that has begun and has no position must be moved."""

    def __init__(self, machine: Machine, rng: random.Random, oracle: Oracle, trace: Callable[[str], None]) -> None:
        self.machine, self.rng, self.oracle, self.trace = machine, rng, oracle, trace
        self.is_calm = False

    @abstractmethod
    def attach(self, process: Process) -> None:
        """This process uses the backend."""

    @abstractmethod
    def open_broker(self) -> AbstractAsyncContextManager[Broker]:
        """The real code, in the process whose step this is."""

    @abstractmethod
    def make_topics(self, topics: Mapping[str, int]) -> None:
        """Create these, with their numbers of partitions."""

    @abstractmethod
    async def has_begun(self, broker: Broker, group: str, topic: str, count: int) -> bool:
        """Whether the group has begun in all partitions: what is written from now on is for it."""

    @abstractmethod
    def write(self, topic: str) -> None:
        """Somebody appends to some partition."""

    @abstractmethod
    def strike(self, fault: str) -> None:
        """One of `faults` or of `away`; it ends by itself."""

    def mend(self) -> None:  # noqa: B027 - most worlds have nothing to mend
        """What an operator does before a group is moved that has stopped."""

    @abstractmethod
    def calm(self) -> None:
        """All faults end, for good."""

    @abstractmethod
    def close(self) -> None:
        """The history is over."""
