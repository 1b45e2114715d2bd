"""How a backend enters the contract suite: a `Harness`. Everything else in this folder knows only this protocol.

`open_spec` lets a child process (`tests.contract.child`) open the same storage with the same short group time-outs.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from services.core.broker.contract import Broker


class Harness(Protocol):
    """One backend's real storage, and the ways to hurt it. One per test; topics and groups of a test are fresh."""

    spec: str
    """`kind:address`, understood by `open_spec` in any process of this machine."""

    url: str
    """The same as a URL for `connect.open_broker`."""

    member_timeout: float
    """Seconds after which a member that was killed or frozen has lost its partitions. Short: tests wait for it."""

    poll_interval: float
    """Seconds without a poll after which the client library or backend, left alone, would give up on a member."""

    def open(self, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
        """One more connection of its own, as another process would have, with the short time-outs above.

        patience: so many seconds instead, until a silent member is lost and a draining one is not waited for any longer: a busy
        machine may stand still for longer than the short ones.
        """

    def fresh_name(self, hint: str) -> str:
        """A topic or group name that no other test uses."""

    async def create_topic(self, broker: Broker, partitions: int = 1) -> str:
        """A fresh empty topic, ready for appends, replicated as in production."""

    async def crash(self, topic: str, partition: int = 0) -> None:
        """Kill -9 what answers for this partition's appends, and bring it back; returns when it serves again.

        Kafka: the partition's leader (its followers go on meanwhile). The log has no server: the process that holds the
        write lock at this moment (a child of the harness, in the middle of a transaction on this topic) is killed.
        """

    async def restart(self) -> None:
        """Stop and start the whole backend, cleanly. No connection is open meanwhile."""

    @property
    def compacts(self) -> bool:
        """Whether the backend has compacted topics."""

    async def compact(self, topic: str) -> None:
        """Let the backend compact a topic whose retention is a millisecond. It may need another append to begin."""

    async def expire(self, topic: str, partition: int, before: int) -> None:
        """Let retention pass: every record of the partition below offset `before` is gone afterwards."""


def open_spec(spec: str) -> AbstractAsyncContextManager[Broker]:
    """Open what `Harness.spec` names, as `Harness.open` does."""
    kind, _, address = spec.partition(":")
    if kind == "log":
        from tests.contract.harness_log import open_for_tests

        return open_for_tests(address)
    if kind == "several":
        from tests.contract.harness_several import open_for_tests as open_several

        return open_several(address)
    if kind == "kafka":
        from tests.contract.harness_kafka import open_for_tests as open_kafka

        return open_kafka(address)
    if kind == "kinesis":
        from tests.contract.harness_kinesis import open_for_tests as open_kinesis

        return open_kinesis(address)
    raise ValueError(f"unknown harness {kind!r}")
