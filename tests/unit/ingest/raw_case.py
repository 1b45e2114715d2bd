"""A table's row: bytes on a raw socket, what ingest answers, whether the connection goes on, and what is stored afterwards."""

from dataclasses import dataclass

from services.ingest.json_events import Limits
from tests.support.raw_http import Client, make_request
from tests.unit.ingest.service import LIMITS, running

PATH = "/v1/streams/plain/events"
_FRESH = b'{"fresh":1}'


@dataclass(frozen=True)
class Case:
    """wire: sent at once. answers: status and problem (None for none) of each answer, in order.

    open: whether the connection takes another request. stored: the payloads, in order, in `stream`. ends: whether the client ends
    its side behind the wire.
    """

    name: str
    wire: bytes
    answers: tuple[tuple[int, str | None], ...]
    open: bool
    stored: tuple[bytes, ...] = ()
    ends: bool = False
    stream: str = "plain"
    limits: Limits = LIMITS


def post(body: bytes, *lines: str, stream: str = "plain", media: str | None = "application/json") -> bytes:
    """A request whose framing is right; `lines` are further header lines."""
    head, blank, rest = make_request(f"/v1/streams/{stream}/events", body, media=media).partition(b"\r\n\r\n")
    return b"\r\n".join([head, *[line.encode("latin-1") for line in lines]]) + blank + rest


async def try_case(case: Case) -> None:
    """Send it, and hold what comes back and what is stored against it. Another connection works afterwards."""
    async with running(limits=case.limits) as service:
        async with Client(service.port) as client:
            await client.send(case.wire)
            if case.ends:
                client.end()
            replies = [await client.reply() for _ in case.answers]
            found = tuple(
                (reply.status, reply.problem if "problem" in reply.headers.get("content-type", "") else None)
                for reply in replies
            )
            assert found == case.answers
            expected = list(case.stored)
            if case.open:
                assert not any(reply.closed for reply in replies)
                reply = await client.request(post(_FRESH))
                assert (reply.status, reply.json()) == (200, {"accepted": 1})
            else:
                assert case.ends or replies[-1].closed
                assert await client.is_over()
        stored = [one for one in service.values(case.stream) if one != _FRESH]
        assert stored == expected
        assert len(service.values()) == case.open + (len(expected) if case.stream == "plain" else 0)
        assert (await service.post(_FRESH)).status == 200
