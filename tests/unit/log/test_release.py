"""Partitions that were drained, while groups.db cannot be written for a moment."""

import asyncio
import fcntl
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.log import LogBroker
from services.core.broker.log.leases import Leases
from services.core.broker.log.membership import Timing
from services.core.broker.record import TopicPartition
from tests.contract.traffic import ignore_revoke

DEADLINE = 600.0


async def test_a_release_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one busy moment leaves drained partitions with a member that does not read them any more, for ever."""
    failures = [Unavailable("busy"), Unavailable("busy")]
    real = Leases.release

    def release(self: Leases, group: str, member: str, held: Mapping[TopicPartition, int], leave: bool = False) -> None:
        if held and failures and not leave:
            raise failures.pop()
        real(self, group, member, held, leave)

    monkeypatch.setattr(Leases, "release", release)
    async with LogBroker.open(str(tmp_path), timing=Timing(lease=3600)) as broker:
        await broker.admin.create_topic(TopicSpec("orders", partitions=4))
        async with broker.consumer("g", ["orders"], start="earliest", on_revoke=ignore_revoke) as first:
            assert len(first.assignment()) == 4
            async with broker.consumer("g", ["orders"], start="earliest", on_revoke=ignore_revoke) as second:
                async with asyncio.timeout(DEADLINE):
                    while len(second.assignment()) < 2:
                        await asyncio.sleep(0.01)
                assert not failures, "no release failed: the test proves nothing"
                assert not first.assignment() & second.assignment()
                assert len(first.assignment()) == 2


async def test_members_that_join_at_once_share_their_files(tmp_path: Path) -> None:
    """If it fails, each lane of a process opens groups.db for itself, and all but one stay open until the process ends."""

    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec("orders"))

        async def join(group: str) -> None:
            async with broker.consumer(group, ["orders"], start="earliest", on_revoke=ignore_revoke):
                pass

        await asyncio.gather(*(join(f"g{number}") for number in range(4)))
    with (tmp_path / "groups.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while it is open somewhere
