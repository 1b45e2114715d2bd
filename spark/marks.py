"""The marks of the transforms that have begun (`services.core.control.transform_marks`), for the threads of jobs."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from services.core.broker.contract import Reader
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.control.transform_marks import SERVICE, TransformMark, TransformMarks, write_transform_mark
from services.core.pipe_file.state_plan import StatePlan
from services.core.pipe_file.topic_names import CONTROL

T = TypeVar("T")
_ANSWER_S = 30.0


class Marks(Protocol):
    """Both methods block, and raise BrokerError kinds. Thread-safe."""

    def read(self, pipe: str) -> TransformMark | None:
        """The newest mark of the pipe that is stored now."""

    def write(self, pipe: str, checkpoint: str, plan: StatePlan | None) -> None:
        """Mark that the pipe's transform has begun with the checkpoint of this id, which has the state of this plan.

        Returns when the mark is durable.
        """


class BrokerMarks:
    """On the broker. Made on the event loop that serves the broker; called from other threads only."""

    def __init__(self, reader: Reader, producer: Producer) -> None:
        self._loop, self._marks, self._producer = asyncio.get_running_loop(), TransformMarks(reader), producer

    def read(self, pipe: str) -> TransformMark | None:
        self._wait(self._marks.refresh())
        return self._marks.of(pipe)

    def write(self, pipe: str, checkpoint: str, plan: StatePlan | None) -> None:
        self._wait(write_transform_mark(self._producer, pipe, "begun", checkpoint, SERVICE, plan))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(_limited(work), self._loop).result()


async def _limited(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(work, _ANSWER_S)
    except TimeoutError:
        raise Unavailable(f"{CONTROL} gave no answer in {_ANSWER_S:.0f} s") from None
