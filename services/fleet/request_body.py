"""Events as CloudEvents batches, so that each has an id before it is sent: a request that is repeated repeats its ids.

An event that is a CloudEvent already stays as it is. Any other becomes the `data` of one, byte for byte, with a new
UUIDv7. Where the stream names an id field of the payload, that id wins over ours (see docs/sending.md).
"""

import os
import time
from collections.abc import Sequence

import msgspec

CONTENT_TYPE = "application/cloudevents-batch+json"
SOURCE = "penstock-send"


class _Probe(msgspec.Struct):
    specversion: object = None
    id: object = None


_probe = msgspec.json.Decoder(_Probe)


def wrap(payload: bytes, stream: str) -> bytes:
    """One element of the batch. The payload is a JSON object."""
    found = _probe.decode(payload)
    if found.specversion is not None and found.id is not None:
        return payload
    head = f'{{"specversion":"1.0","id":"{make_id()}","source":"{SOURCE}","type":"{stream}","data":'
    return head.encode() + payload + b"}"


def join(elements: Sequence[bytes]) -> bytes:
    """The request's body."""
    return b"[" + b",".join(elements) + b"]"


def make_id() -> str:
    """A new UUID version 7 (RFC 9562)."""
    millis = time.time_ns() // 1_000_000
    number = millis << 80 | int.from_bytes(os.urandom(10), "big")
    number = number & ~(0xF << 76) | 7 << 76
    number = number & ~(0x3 << 62) | 2 << 62
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
