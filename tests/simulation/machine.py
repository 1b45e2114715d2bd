"""The simulated machine: processes that can be killed between any two of their steps, or frozen, on one virtual loop.

A process is a context: every task, timer and callback that is made in it carries it. A kill drops all of these without another
step of theirs: no `finally` runs, memory is gone, and what had left for the broker arrives there all the same.
"""

import asyncio
import contextvars
import random
import signal
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from contextvars import copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar, cast

from tests.support.virtual_loop import Deadlock, VirtualLoop

_T = TypeVar("_T")
TURN_S = 1e-6
"""Passes in each turn: who waits for a moment and wakes a rounding error before it would otherwise wait for ever."""
MAX_TURNS = 3_000_000
_PROCESS: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")
WORLD = contextvars.Context()
"""Of what no process does: it happens whoever is killed or frozen."""


def current_process() -> "Process | None":
    """Whose step this is; None: the world's."""
    return _PROCESS.get(None)


class EndlessError(RuntimeError):
    """A history that takes too many turns."""


class Process:
    """One run of one service. `ended` is set when it exits or is killed; status: its exit status, None when it was killed."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self._machine, self.name = machine, name
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.alive, self.frozen = True, False
        self.freezes = 0
        """How often it was frozen."""
        self.hear: Callable[[Mapping[str, Any]], None] | None = None
        """Told each line that it logs."""
        self.status: int | None = None
        self.steps = 0
        self.kill_at = -1
        self.skew = 0.0
        """How far ahead its wall clock is."""
        self.on_death: list[Callable[[], None]] = []
        self.listeners: list[Callable[[], asyncio.Protocol]] = []
        self.found: dict[str, Any] = {}
        """Parts of the service that the simulation looks into."""
        self.ended = asyncio.Event()
        self._held: list[_Handle] = []
        self._on_signal: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self._main: asyncio.Task[int] | None = None

    def start(self, main: Coroutine[Any, Any, int]) -> None:
        """Run it."""
        self._main = self._machine.create_task(main, context=self.context)
        self._main.add_done_callback(self._exited, context=WORLD)

    def _exited(self, main: "asyncio.Task[int]") -> None:
        if not self.alive:
            return
        error = None if main.cancelled() else main.exception()
        if error is not None:
            self._machine.failures.append(f"{self.name} crashed: {error!r}")
            self._machine.trace("".join(traceback.format_exception(error)))
        self.status = 1 if error is not None or main.cancelled() else main.result()
        self._end()

    def kill(self) -> None:
        """As SIGKILL."""
        if self.alive:
            self._end()

    def _end(self) -> None:
        self.alive = False
        self._held.clear()
        self.ended.set()
        for told in self.on_death:
            told()

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.frozen = True
        self.freezes += 1

    def thaw(self) -> None:
        """As SIGCONT."""
        self.frozen = False
        held, self._held = self._held, []
        for handle in held:
            self._machine.ready_again(handle)

    def terminate(self) -> None:
        """As SIGTERM."""
        if self.alive and self._on_signal is not None:
            callback, args = self._on_signal
            self._machine.call_soon(callback, *args, context=self.context)

    def handle_signal(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """What SIGTERM does."""
        self._on_signal = callback, args

    def step(self, handle: "_Handle") -> bool:
        """Whether this callback of ours may run."""
        if not self.alive:
            return False
        if self.frozen:
            self._held.append(handle)
            return False
        self.steps += 1
        if self.steps == self.kill_at:
            self._machine.trace(f"killed {self.name} at step {self.steps}")
            self.kill()
            return False
        return True


class _Handle:
    """As asyncio's, without what it does for debugging: a history makes some thousands. callback: None when it is cancelled."""

    __slots__ = ("_when", "args", "callback", "context")

    def __init__(self, callback: Any, args: Any, context: contextvars.Context | None, when: float = 0.0) -> None:
        self.callback, self.args, self._when = callback, args, when
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        """As there."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """As there."""
        return self.callback is None

    def when(self) -> float:
        """As there, of a timer."""
        return self._when


class _Counted:
    """With a hash that does not depend on where it lies in memory: sets of tasks are walked in the same order each time."""

    _number = 0

    def __hash__(self) -> int:
        if not self._number:
            self._number = cast("Any", self).get_loop().count_up()
        return self._number


class _Task(_Counted, asyncio.Task[Any]):
    pass


class _Future(_Counted, asyncio.Future[Any]):
    pass


class Machine(VirtualLoop):
    """The loop of one history. failures: errors that no code of ours caught."""

    def __init__(self, rng: random.Random, trace: Callable[[str], None]) -> None:
        super().__init__()
        self.rng, self.trace = rng, trace
        self.failures: list[str] = []
        self._numbers = 0
        self._timers: list[tuple[float, int, _Handle]] = []
        self._ready: deque[_Handle]
        self._is_over = False
        self.turns = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._record_error)

    get_debug = bool  # it gives False, and takes no Python to do so: each future and each task asks for it
    _asyncgen_firstiter_hook = bool  # nor is it on record which asynchronous generators there are: nobody asks
    _stopping: bool

    def create_task(
        self, coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T], *, name: object = None, context: Any = None
    ) -> "asyncio.Task[_T]":
        """As there; its process keeps it."""
        task = _Task(coro, loop=self, name=cast("Any", name), context=context)
        hash(task)  # it has its number from now on, wherever it is kept
        process = _PROCESS.get(None) if context is None else context.get(_PROCESS)
        (self._tasks if process is None else process.tasks).append(task)
        return task

    def create_future(self) -> "asyncio.Future[Any]":
        """As there, countable."""
        return _Future(loop=self)

    def count_up(self) -> int:
        """The next number."""
        self._numbers += 1
        return self._numbers

    def ready_again(self, handle: "_Handle") -> None:
        """What a thawed process held back."""
        self._ready.append(handle)

    def _run_once(self) -> None:
        """As there, but turn after turn until the loop is stopped, and each callback's process is asked whether it may run."""
        timers, ready, now = self._timers, self._ready, self._now
        while True:
            if not ready and not self._stopping:
                now = max(now, self._find_next())
            now += TURN_S
            self._now = now
            while timers and timers[0][0] <= now:
                ready.append(heappop(timers)[2])
            self.turns += 1
            if self.turns > MAX_TURNS:
                raise EndlessError("too many turns of the loop")
            left = len(ready)
            while left:
                left -= 1
                handle = ready.popleft()
                context, callback = handle.context, handle.callback
                if callback is None or ((process := context.get(_PROCESS)) is not None and not process.step(handle)):
                    continue
                try:
                    context.run(callback, *handle.args)
                except Exception as error:
                    self.call_exception_handler({"message": f"in {callback}", "exception": error})
            if self._stopping:
                return

    def _find_next(self) -> float:
        """When the next timer is due. Raises Deadlock."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heappop(timers)
        if not timers:
            raise Deadlock("nothing is ready and no timer is set")
        return timers[0][0]

    def call_at(  # type: ignore[override]  # typeshed has *args of a TypeVarTuple here
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> "_Handle":
        """As there; of those for one moment the first comes first."""
        handle = _Handle(callback, args, context, when)
        self._numbers += 1
        heappush(self._timers, (when, self._numbers, handle))
        return handle

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> "_Handle":
        """As there."""
        when = self._now + delay
        handle = _Handle(callback, args, context, when)
        self._numbers += 1
        heappush(self._timers, (when, self._numbers, handle))
        return handle

    def call_soon(  # type: ignore[override]  # typeshed has *args of a TypeVarTuple here
        self, callback: Any, *args: Any, context: Any = None
    ) -> "_Handle":
        """As there; nothing once the history is over."""
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def run_in_executor(  # type: ignore[override]  # typeshed has *args of a TypeVarTuple here
        self, executor: Any, call: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """As there; a modelled thread takes its time."""
        run = getattr(executor, "run", None)
        return super().run_in_executor(executor, call, *args) if run is None else cast("Any", run(call, *args))

    def add_signal_handler(  # type: ignore[override]  # as above
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Of the process whose step this is."""
        process = current_process()
        if process is not None and sig == signal.SIGTERM:
            process.handle_signal(callback, args)

    async def create_server(  # type: ignore[override]  # of all it takes, only this matters
        self, factory: Any, *_: Any, **__: Any
    ) -> Any:
        """The process listens: connections are made by `tests.simulation.network`."""
        process = current_process()
        assert process is not None
        process.listeners.append(factory)
        return _Server(process, factory)

    def _record_error(self, _loop: object, context: dict[str, Any]) -> None:
        if not self._is_over:
            self.failures.append(f"unhandled: {context.get('message')}: {context.get('exception')!r}")

    def run(self, main: Awaitable[None]) -> None:
        """Until it ends. Raises what it raises."""
        self.run_until_complete(main)

    def finish(self, processes: list[Process]) -> None:
        """Throw away all tasks, silently."""
        self._is_over = True
        self._ready = deque(maxlen=0)
        for process in processes:
            process.alive = False
            process.context.run(_close, process.tasks)  # what they log meanwhile is of a process that is dead
            process.tasks = []
        _close(self._tasks)
        self._tasks = []
        self.close()


def _close(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # no public way
            with suppress(
                RuntimeError, ValueError, AttributeError
            ):  # it waits in a `finally`; a lock then finds no loop
                cast("Any", task.get_coro()).close()


def keep_no_tasks() -> None:
    """Once, before the first history: asyncio keeps a set of weak references to all tasks, for which nobody asks."""
    asyncio.tasks._all_tasks.add = bool  # type: ignore[attr-defined]  # something that does nothing with it


class _Server:
    """What `create_server` gives."""

    def __init__(self, process: Process, factory: Any) -> None:
        self._process, self._factory = process, factory
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._process.name, 0

    def close(self) -> None:
        if self._factory in self._process.listeners:
            self._process.listeners.remove(self._factory)
