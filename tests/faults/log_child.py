"""A process to kill, freeze or trace: appends numbered records to a log and says what was answered, line by line.

python -m tests.faults.log_child FOLDER TOPIC NAME COUNT      COUNT 0: until killed
One JSON line per append, after its answer: {"acked": n} or {"failed": n, "error": "..."}. Values: "NAME:n".
"""

import asyncio
import json
import os
import sys

from services.core.broker.errors import BrokerError
from services.core.broker.log import LogBroker
from services.core.broker.record import Record


async def append_numbers(folder: str, topic: str, name: str, count: int) -> None:
    """One append at a time, one record each."""
    async with LogBroker.open(folder) as broker:
        await broker.probe(topic, timeout=10)
        number = 0
        while not count or number < count:
            record = Record(b"k", f"{name}:{number}".encode(), 1_700_000_000_000 + number)
            try:
                await broker.appender.append(topic, 0, [record], timeout=10)
            except BrokerError as error:
                say({"failed": number, "error": type(error).__name__})
            else:
                say({"acked": number})
            number += 1


def say(fact: dict[str, object]) -> None:
    """One line in one write, so that a kill never leaves half of it."""
    os.write(1, json.dumps(fact).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(append_numbers(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
