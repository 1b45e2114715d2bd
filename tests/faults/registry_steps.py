"""A registration that is killed before each of its steps on the disk, one after the other; another registry goes on each time.

python -m tests.faults.registry_steps FOLDER      prints one JSON line: the steps at which it was killed, what was answered
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.registry_child import make_schema, open_registrar

STEPS = ("mkdir", "open", "fsync", "link", "unlink", "close")
"""Functions of `os` that a folder's `create` calls. Reading ends a process at the same places, and changes nothing."""


async def register(url: str, name: str, number: int) -> dict[str, Any]:
    """One registration of a registry that was started for it."""
    registrar = await open_registrar(url)
    candidate = await registrar.read(make_schema(name, number))
    version = await registrar.register("s", candidate, name)
    return {"id": version.schema.id, "version": version.number, "fingerprint": candidate.parsed.fingerprint}


def kill_before(step: int, told: int) -> None:
    """End this process with kill -9 before the n-th call of one of STEPS, from 1. The call's name goes to the pipe."""
    left = step

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.write(told, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in STEPS:
        setattr(os, name, watched(name, getattr(os, name)))


def child(work: Callable[[int], None]) -> tuple[int, bytes]:
    """The status of a forked process, and what it wrote into its pipe."""
    read, write = os.pipe()
    number = os.fork()
    if not number:
        work(write)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    return os.waitpid(number, 0)[1], content


def run(url: str) -> dict[str, Any]:
    """Until a registration ends by itself."""
    killed, answered = [], []
    for step in range(1, 100):

        def first(told: int, step: int = step) -> None:
            kill_before(step, told)
            asyncio.run(register(url, "all", 2 * step))

        status, name = child(first)
        killed += [name.decode()] if status else []
        for who in ("all", "other"):  # the same schema again, and another one

            def second(told: int, who: str = who, step: int = step) -> None:
                os.write(told, json.dumps(asyncio.run(register(url, who, 2 * step + (who == "other")))).encode())

            status_of_second, content = child(second)
            assert not status_of_second, f"after a kill before {name!r} nobody can register"
            answered.append(json.loads(content))
        if not status:
            break
    return {"killed": killed, "answered": answered}


if __name__ == "__main__":
    print(json.dumps(run(f"file://{Path(sys.argv[1]).absolute()}")))
