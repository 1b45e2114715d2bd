"""Two embedded logs as one broker in the contract suite: the topics of a test are on both of them in turn."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.several.broker import open_several
from services.core.broker.several.brokers import DEFAULT, Places
from tests.contract.harness_log import TIMING, LogHarness
from tests.contract.harness_log import open_for_tests as open_log

_OTHER, _OTHERS_END = "other", "-other"


@asynccontextmanager
async def open_for_tests(address: str, patience: float | None = None) -> AsyncIterator[Broker]:
    """address: the folder of both."""
    other = {_OTHER: partial(open_log, f"{address}/second/log", patience)}
    async with open_log(f"{address}/first/log", patience) as own, open_several(own, other, _ByName({})) as broker:
        yield broker


class _ByName(Places):
    def of(self, topic: str) -> str:
        return _OTHER if topic.endswith(_OTHERS_END) else DEFAULT

    def with_streams(self) -> set[str]:
        return {DEFAULT, _OTHER}


class SeveralHarness:
    """Two logs in `folder`."""

    member_timeout = TIMING.lease
    poll_interval = TIMING.lease
    compacts = True

    def __init__(self, folder: Path) -> None:
        self._logs = {DEFAULT: LogHarness(folder / "first"), _OTHER: LogHarness(folder / "second")}
        self._names = 0
        self.spec = f"several:{folder}"
        self.url = self._logs[DEFAULT].url
        self._folder = folder

    def open(self, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
        """One more connection, as another process would have."""
        return open_for_tests(str(self._folder), patience)

    def fresh_name(self, hint: str) -> str:
        """Every second one is on the other log."""
        self._names += 1
        return f"{self._of('').fresh_name(hint)}{_OTHERS_END if self._names % 2 else ''}"

    async def create_topic(self, broker: Broker, partitions: int = 1) -> str:
        """A fresh empty topic."""
        name = self.fresh_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=partitions))
        return name

    async def crash(self, topic: str, partition: int = 0) -> None:
        """As in `LogHarness`."""
        await self._of(topic).crash(topic, partition)

    async def restart(self) -> None:
        """As in `LogHarness`."""

    async def compact(self, topic: str) -> None:
        """As in `LogHarness`."""
        await self._of(topic).compact(topic)

    async def expire(self, topic: str, partition: int, before: int) -> None:
        """As in `LogHarness`."""
        await self._of(topic).expire(topic, partition, before)

    def _of(self, topic: str) -> LogHarness:
        return self._logs[_ByName({}).of(topic)]
