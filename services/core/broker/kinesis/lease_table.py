"""What a group's lease table can do: read all, add, compare and swap. DynamoDB has it in `dynamo_table`."""

from typing import Protocol

from services.core.broker.kinesis.leases import Lease


class LeaseTable(Protocol):
    """One group's rows. Every call raises `errors.BrokerError` kinds only and is bounded in time."""

    async def rows(self) -> dict[str, Lease]:
        """All rows by key, each as it was last written."""

    async def get(self, key: str) -> Lease | None:
        """One row, as it was last written."""

    async def add(self, lease: Lease) -> None:
        """Make a row, unless there is one of this key."""

    async def remove(self, old: Lease) -> None:
        """Remove a row, unless its counter is another by now."""

    async def replace(self, old: Lease, new: Lease) -> bool:
        """Write `new` with a counter one higher than `old` has. False, and nothing is written, when the counter is another
        by now. After an error it may have been written."""
