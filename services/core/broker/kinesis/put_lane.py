"""PutRecords of one stream: what waits for several shards travels in one request."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.faults import AWS_ERRORS, classify_entry, classify_put
from services.core.broker.kinesis.put_records import Put

SendPuts = Callable[[str, Sequence[Put]], Awaitable[list[dict[str, Any]]]]
"""`PutRecords`, or what stands for it in a test."""

MAX_ENTRIES = 500
MAX_REQUEST_BYTES = 5_000_000
"""Of one PutRecords request, partition keys included; the service takes 5 MiB."""

_REQUESTS = 4
"""Under way at once. A slow one holds up no other shard; more than a few only make each of them smaller."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One entry on its way. answer: its sequence number. sent: whether it may be stored, though nobody waits for the answer.

    leave_by (the loop's time): later it is not sent, because no answer could come in time.
    """

    put: Put
    leave_by: float
    answer: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: bool = False


class PutLane:
    """Gathers what one loop tick brings, and what comes while all requests are under way."""

    def __init__(self, send: SendPuts, topic: str) -> None:
        self._send, self._topic = send, topic
        self._waiting: list[Parcel] = []
        self.running: set[asyncio.Task[None]] = set()
        self._is_woken = False

    def add(self, parcel: Parcel) -> None:
        """Send it soon. A parcel whose answer was cancelled before its request left is never sent."""
        self._waiting.append(parcel)
        if not self._is_woken and len(self.running) < _REQUESTS:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        while self._waiting and len(self.running) < _REQUESTS:
            parcels = self._take()
            if parcels:
                task = asyncio.create_task(self._put(parcels), name=f"put {self._topic}")
                self.running.add(task)
                task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self.running.discard(task)
        self._wake()

    def _take(self) -> list[Parcel]:
        size = taken = 0
        for parcel in self._waiting[:MAX_ENTRIES]:
            size += len(parcel.put.data) + len(parcel.put.partition_key)
            if taken and size > MAX_REQUEST_BYTES:
                break
            taken += 1
        parcels, self._waiting = self._waiting[:taken], self._waiting[taken:]
        now, late = asyncio.get_running_loop().time(), f"append to {self._topic}: its request could not leave in time"
        for parcel in parcels:
            if parcel.leave_by < now:
                _settle(parcel, error=Unavailable(late))
        taken_now = [parcel for parcel in parcels if not parcel.answer.done()]
        for parcel in taken_now:
            parcel.sent = True  # from here on nothing holds it back
        return taken_now

    async def _put(self, parcels: list[Parcel]) -> None:
        try:
            rows = await self._send(self._topic, [parcel.put for parcel in parcels])
        except AWS_ERRORS as error:
            for parcel in parcels:
                _settle(parcel, error=classify_put(error, f"append to {self._topic}"))
        except Exception as error:  # a fault of ours
            for parcel in parcels:
                _settle(parcel, error=error)
        except BaseException:
            for parcel in parcels:
                parcel.answer.cancel()
            raise
        else:
            for parcel, row in zip(parcels, rows, strict=True):
                code = row.get("ErrorCode")
                refusal = (
                    classify_entry(code, row.get("ErrorMessage", ""), f"append to {self._topic}") if code else None
                )
                _settle(parcel, row.get("SequenceNumber", ""), refusal)


def _settle(parcel: Parcel, sequence: str = "", error: Exception | None = None) -> None:
    if parcel.answer.done():
        return
    if error is None:
        parcel.answer.set_result(sequence)
    else:
        parcel.answer.set_exception(error)
