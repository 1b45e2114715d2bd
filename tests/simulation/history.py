"""What all kinds of histories share: a seed makes a world, which runs on a virtual clock to its end, and is judged."""

import asyncio
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation.clock import follow, seed_everything
from tests.simulation.machine import EndlessError, Machine, Process
from tests.support.virtual_loop import Deadlock

_MAX_FAILURES = 5


@dataclass
class Verdict:
    """What came of a seed. digest: of everything that happened. complaints: every way in which a promise was broken."""

    seed: int
    complaints: list[str] = field(default_factory=list)
    digest: str = ""
    figures: dict[str, int] = field(default_factory=dict)


class History(ABC):
    """The world of one seed.

    rng_seed: of its own draws; other than those of other kinds. tell: gets each line of the trace.
    """

    def __init__(self, seed: int, rng_seed: int, tell: Callable[[str], None] | None) -> None:
        seed_everything(seed)
        self.seed, self.rng = seed, random.Random(rng_seed)
        self._tell, self._hash = tell, hashlib.sha256()
        self.machine = Machine(self.rng, self.trace)
        self._begun = self.machine.time()
        self.verdict = Verdict(seed)

    def trace(self, line: str) -> None:
        """A part of what happens."""
        text = f"{self._elapsed():9.3f} {line}"
        self._hash.update(text.encode())
        if self._tell is not None:
            self._tell(text)

    def strike_one(self, kind: str, processes: Sequence[Process]) -> Process | None:
        """Choose one of these for a strike of this kind; None: there is none. A kill is done with it: it comes at a step of the
        process, soon."""
        if not processes:
            return None
        process = self.rng.choice(processes)
        self.trace(f"{kind} {process.name}")
        if kind == "kill":
            steps = self.rng.choice((1, self.rng.randint(1, 300), self.rng.randint(1, 40)))
            process.kill_at = process.steps + steps
        return process

    def _elapsed(self) -> float:
        """Virtual seconds."""
        return self.machine.time() - self._begun

    def run(self) -> Verdict:
        """Everything, to the verdict."""
        verdict = self.verdict
        with follow(self.machine):
            try:
                self.machine.run(self._live())
            except (Deadlock, EndlessError) as error:
                verdict.complaints.append(f"everything stands still: {error}")
            finally:
                self._throw_away()
        verdict.complaints += self._failures()[:_MAX_FAILURES]
        verdict.digest = self._hash.hexdigest()[:16]
        verdict.figures |= {"turns": self.machine.turns, "virtual_s": int(self._elapsed())}
        return verdict

    @abstractmethod
    async def _live(self) -> None:
        """All that happens, with the judgement: it fills the complaints and the figures of the verdict."""

    @abstractmethod
    def _all_processes(self) -> list[Process]:
        """That ever ran."""

    def _throw_away(self) -> None:
        """What is left, also after a history that stands still."""
        self.machine.finish(self._all_processes())

    def _failures(self) -> list[str]:
        """Errors that no code caught."""
        return self.machine.failures

    async def wait_for(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Whether it came to be within so many virtual seconds."""
        until = self.machine.time() + seconds
        while not is_done():
            if self.machine.time() > until:
                return False
            await asyncio.sleep(0.5)
        return True
