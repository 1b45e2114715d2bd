"""What ingest does with a request's bytes, without HTTP and broker: CPU per event, beside one `orjson.loads` of the same body.

python -m bench.ingest_parse [events per request …]
"""

import sys
import time
from collections.abc import Callable

import orjson

from services.core.pipes import Stream
from services.ingest.intake import Intake
from services.ingest.items import Limits
from services.ingest.json_events import read_json, read_lines

LIMITS = Limits(10_000, 1_000_000, 5_000_000)
ROUNDS = 5


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
    main([int(argument) for argument in sys.argv[1:]] or [1, 100, 1000])
