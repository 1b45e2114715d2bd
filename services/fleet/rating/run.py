"""The rating of one service, from the first step to the last."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from services.fleet.rating.expel import expel_rig
from services.fleet.rating.ingest import ingest_rig
from services.fleet.rating.rig import Rig, Shape, run_step
from services.fleet.rating.steps import Step, next_rate
from services.fleet.stop import Stop

RIGS: Mapping[str, Callable[[Path, Shape, Stop], AbstractAsyncContextManager[Rig]]] = {
    "expel": expel_rig,
    "ingest": ingest_rig,
}
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Course:
    """first: the first rate, events a second. seconds: of each step."""

    first: float
    seconds: float


async def run_rating(
    service: str, shape: Shape, course: Course, stop: Stop, tell: Callable[[Step], None]
) -> list[Step]:
    """All steps in order, `tell` after each. The broker's log, up to some GB, goes with it. Raises CommandFailed."""
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="penstock-rate-") as folder:
        async with RIGS[service](Path(folder), shape, stop) as rig:
            await run_step(rig, course.first, WARM_UP_S, stop)  # what a first request opens and compiles does not count
            while (rate := next_rate(steps, course.first)) is not None:
                steps.append(await run_step(rig, rate, course.seconds, stop))
                tell(steps[-1])
    return steps
