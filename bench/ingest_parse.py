"""What ingest does with a request's bytes, without HTTP and broker: CPU per event, beside one `orjson.loads` of the same body.

And how long the longest slice of a large body holds the event loop.

python -m bench.ingest_parse [events per request …]
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import orjson
from aiohttp.http import RawRequestMessage

from services.core.pipes import Stream
from services.core.startup import tune_garbage_collector
from services.ingest.body_formats import Format, read_slices
from services.ingest.intake import Intake
from services.ingest.json_events import Limits, read_json, read_lines
from services.ingest.problems import Refused

LIMITS = Limits(10_000, 1_000_000, 5_000_000)
ROUNDS = 5
NO_HEADERS = cast("RawRequestMessage", None)
"""JSON needs none."""


def sample_event(number: int) -> dict[str, object]:
    """About 300 bytes of JSON, like a row of the flights in `examples/`."""
    return {
        "id": f"flight-{number:09d}",
        "time": "2025-01-02T03:04:05.678Z",
        "carrier": "UA",
        "flight": number,
        "origin": "EWR",
        "dest": "IAH",
        "dep_delay": 2.5,
        "tail": "N14228",
        "note": "x" * 130,
        "nested": {"stops": [1, 2], "meal": None},
    }


def microseconds(run: Callable[[], object], events: int) -> float:
    """CPU per event, the best of a few rounds of about 50 ms."""
    started = time.process_time()
    run()
    repeat = max(1, int(0.05 / max(1e-6, time.process_time() - started)))
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(repeat):
            run()
        best = min(best, time.process_time() - started)
    return best / repeat / events * 1e6


def main(sizes: list[int]) -> None:
    """Print a table."""
    print("events     loads     array  +records +id,t,key     lines   (us CPU per event)")
    for size in sizes:
        print(f"{size:6} " + " ".join(f"{cost:9.2f}" for cost in measure(size)))
    print("\nlongest slice of (ms CPU)")
    for name, body in large_bodies().items():
        print(f"{longest_slice(body):9.1f}  {name}")


def longest_slice(body: bytes) -> float:
    """CPU in ms of the longest slice of a JSON body, the best of a few rounds. Refused bodies count until they are."""
    best = float("inf")
    for _ in range(ROUNDS):
        longest, slices = 0.0, read_slices(body, "application/json", Format.JSON, NO_HEADERS, LIMITS)
        with suppress(Refused):
            while True:
                started = time.thread_time()
                try:
                    if next(slices, None) is None:
                        break
                finally:
                    longest = max(longest, time.thread_time() - started)
        best = min(best, longest)
    return best * 1e3


def large_bodies() -> dict[str, bytes]:
    """By what is in them."""
    texts, lists = b'{"a":[' + b'"a",' * 240_000 + b"0]}", b'{"a":[' + b"[]," * 330_000 + b"0]}"
    return {
        "10,000 events": orjson.dumps([sample_event(number) for number in range(10_000)]),
        "five events of 1 MB, of texts": b"[" + b",".join([texts] * 5) + b"]",
        "five events of 1 MB, of empty lists": b"[" + b",".join([lists] * 5) + b"]",
        "an event of 99,000 objects": b'{"a":[' + b'{"a":0},' * 98_000 + b"0]}",
        "an event of 5 MB": b'[{"a":[' + b'"a",' * 1_200_000 + b"0]},{}]",
    }


def measure(size: int) -> list[float]:
    """The costs of each step for requests of this many events."""
    events = [sample_event(number) for number in range(size)]
    array, lines = orjson.dumps(events), b"\n".join(map(orjson.dumps, events))
    plain, named = (
        Intake("bench", stream, lambda _topic, _count: 0)
        for stream in (Stream(), Stream(id="id", time="time", key="tail"))
    )
    plain.partitions = named.partitions = 4
    items = read_json(array, LIMITS)
    now = time.time_ns() // 1_000_000
    steps: list[Callable[[], object]] = [
        lambda: orjson.loads(array),
        lambda: read_json(array, LIMITS),
        lambda: plain.prepare(items, now, None),
        lambda: named.prepare(items, now, None),
        lambda: read_lines(lines, LIMITS),
    ]
    return [microseconds(step, size) for step in steps]


if __name__ == "__main__":
    tune_garbage_collector()
    main([int(argument) for argument in sys.argv[1:]] or [1, 100, 1000])
