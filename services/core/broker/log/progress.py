"""Committed offsets from the event loop: commits of all members in this process gathered into one durable transaction."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.core.broker.errors import DataDamaged
from services.core.broker.log.gather import Gatherer, Waiting
from services.core.broker.log.groups import Claim, GroupsFile
from services.core.broker.log.layout import DataFolder
from services.core.broker.record import TopicPartition

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds that a commit may take before it is answered as OutcomeUnknown."""


class _Request(Waiting[object]):
    """A claim to commit, or any other work on the file."""

    __slots__ = ("what",)

    def __init__(self, what: Claim | Callable[[GroupsFile], object]) -> None:
        super().__init__()
        self.what = what


class Progress:
    """groups.db's durable half."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._file: GroupsFile | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="log-commit")
        self._gatherer = Gatherer[_Request]("groups", self._threads, self._work, 10_000)

    async def commit(self, claim: Claim) -> frozenset[TopicPartition]:
        """Make the claim's offsets durable; gives those that were refused."""
        refused: frozenset[TopicPartition] = await self._gatherer.put(_Request(claim), TIMEOUT)
        return refused

    async def use(self, work: Callable[[GroupsFile], T]) -> T:
        """Run `work` on the file's thread."""
        done: T = await self._gatherer.put(_Request(work), TIMEOUT)
        return done

    async def close(self, timeout: float) -> None:
        """Finish what is under way and close the file."""
        if await self._gatherer.close(timeout) and self._file is not None:
            await self._gatherer.run(self._file.close)
        self._threads.shutdown(wait=False)

    def _work(self, requests: list[_Request]) -> None:
        if self._file is None:
            self._file = GroupsFile(self._folder)
        try:
            claims = [r for r in requests if isinstance(r.what, Claim)]
            if claims:
                self._commit(self._file, claims)
            for request in requests:
                if not isinstance(request.what, Claim):
                    self._answer(self._file, request)
        finally:
            if self._file.broken:
                self._file.close()
                self._file = None

    @staticmethod
    def _commit(file: GroupsFile, requests: list[_Request]) -> None:
        try:
            refused = file.commit([r.what for r in requests if isinstance(r.what, Claim)])
        except Exception as error:
            for request in requests:
                request.error = error
            file.broken = file.broken or isinstance(error, DataDamaged)
        else:
            for request, answer in zip(requests, refused, strict=True):
                request.outcome = answer

    @staticmethod
    def _answer(file: GroupsFile, request: _Request) -> None:
        assert not isinstance(request.what, Claim)
        try:
            request.outcome = request.what(file)
        except Exception as error:
            request.error = error
