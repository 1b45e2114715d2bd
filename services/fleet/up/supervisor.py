"""Starts the services of a fleet, keeps them running, resizes and drains them. Used by `penstock up`, the demo and `rate`."""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson

from services.core.group_control import GroupControl, GroupState, Instance, SizeRefused
from services.core.process.management import serve_management
from services.core.security.bearer import Tokens
from services.core.version import VERSION
from services.fleet.folder import STATE_FILE, FleetState, ProcessState, write_state, write_token
from services.fleet.problem import CommandFailed
from services.fleet.stop import Stop
from services.fleet.up.output import Notify
from services.fleet.up.plan import START_ORDER, FleetPlan
from services.fleet.up.probe import Probes
from services.fleet.up.process import ServiceProcess, ServiceSpec

POLL_S = 0.1
SAID_AFTER_S = 2.0
"""A person who starts a fleet is told what it waits for after so long, and again each time that it has taken twice as long."""
TIMEOUT = aiohttp.ClientTimeout(total=3.0)


async def check_ready(session: aiohttp.ClientSession, process: ServiceProcess) -> str | None:
    """None when ready, else the reason, for a person. Takes up to 3 s."""
    pid = process.pid
    if pid is None:
        return "does not run"
    try:
        async with session.get(f"http://{process.management}/readyz", timeout=TIMEOUT) as response:
            body = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
        return "does not answer yet"
    if not isinstance(body, dict) or body.get("pid") != pid:
        return f"another program answers at {process.management}"  # it has taken the port, and this process ends
    return None if response.status == 200 else str(body.get("reason") or f"status {response.status}")


GRACE_S = 5.0
"""A service bounds its own drain. It is killed so many seconds later."""

STATE_AGAIN_S = 5.0
_STATE_HINT = "The services continue; penstock status and the autoscaler do not see changes. Try: freeing space there"

Progress = Callable[[str], None]
"""One line for a person, about starting and stopping."""


RESIZABLE: Mapping[str, int] = {"ingest": 64, "expel": 64, "retrier": 10}
"""The maximum number of processes by service. Every other service has exactly one."""


class Fleet:
    """The running processes of one plan, as `core.group_control.Groups`. Owned by `run_fleet`."""

    names = RESIZABLE.keys()
    _group: asyncio.TaskGroup

    def __init__(self, plan: FleetPlan, notify: Notify, progress: Progress, stop: Stop) -> None:
        self.plan, self._notify, self._progress, self._stop = plan, notify, progress, stop
        self.management = ""
        self.drained = False
        self.resizable = self.started = False
        self._state_due = asyncio.Event()
        self.running: dict[ServiceProcess, asyncio.Task[None]] = {}
        self.probes = Probes(lambda: self.processes, self._end_hung)

    @property
    def processes(self) -> list[ServiceProcess]:
        """All processes in the order of their start, also the leaving ones."""
        return list(self.running)

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the services of the plan, in tasks of the group."""
        self._group = group
        self._progress("starting " + ", ".join(spec.name for spec in self.plan.services))
        for spec in self.plan.services:
            self._add(spec)

    def _add(self, spec: ServiceSpec) -> None:
        process = ServiceProcess(
            spec, self.plan.data / "logs", self._notify, self._state_due.set, lambda: not self.started
        )
        self.running[process] = self._group.create_task(process.keep_running(), name=spec.name)

    def processes_of(self, service: str) -> list[ServiceProcess]:
        return [process for process in self.processes if process.spec.service == service]

    def why_not_ready(self) -> str | None:
        """For the supervisor's own /readyz: the first process that does not run."""
        missing = (one.spec.name for one in self.processes if one.pid is None and not one.leaving)
        return next((f"{name} is being started" for name in missing), None)

    async def describe(self, service: str) -> GroupState:
        """Each process with its management address; None while it does not run."""
        processes = self.processes_of(service)
        instances = tuple(Instance(p.spec.name, p.management if p.pid else None, p.leaving) for p in processes)
        return GroupState(sum(not one.leaving for one in processes), instances)

    async def resize(self, service: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        """Start processes of a service, or drain and stop its youngest; returns at once."""
        group = self.processes_of(service)
        staying = [one for one in group if not one.leaving]
        _refuse_size(service, len(staying), _draining(group), seen, size, self.resizable)
        self._progress(f"{service}: {seen} -> {size} processes")
        if size < seen:
            leaving = next((one for one in reversed(staying) if one.spec.name in failed), staying[-1])
            leaving.leave()
            self._group.create_task(self._retire(leaving), name=f"{leaving.spec.name} leaves")
        taken = {one.spec.name for one in group}
        free = (name for name in (f"{service}-{number}" for number in range(1, 1000)) if name not in taken)
        for _ in range(size - seen):
            self._add(dataclasses.replace(staying[0].spec, name=next(free)))

    async def replace(self, service: str, name: str) -> None:
        """Drain and end a process, which is then started again; returns at once."""
        group = self.processes_of(service)
        process = next((one for one in group if one.spec.name == name and not one.leaving), None)
        if not self.resizable:
            raise SizeRefused("the fleet is starting or stopping", again=True)
        if process is None:
            raise SizeRefused(f"{service} has no process {name}", again=True)
        if _draining(group):
            raise SizeRefused(f"a process of {service} is draining already", again=True)
        self._progress(f"{name} is replaced, because it does not work")
        process.begin_replacement()
        ending = process.finish_replacement(self.plan.drain + GRACE_S, self._stop.insisted)
        self._group.create_task(ending, name=f"{name} is replaced")

    def _end_hung(self, process: ServiceProcess, reason: str, answers: bool) -> None:
        """One that still answers may drain what does not hang; another one is killed at once."""
        limit = self.plan.drain + GRACE_S if answers else 0.0
        ending = process.end_hung(reason, limit, self._stop.insisted)
        self._group.create_task(ending, name=f"{process.spec.name} hangs")

    async def _drain(self, process: ServiceProcess) -> bool:
        """Drain and stop it. Returns whether it drained in time."""
        drained = await process.stop(self.plan.drain + GRACE_S, self._stop.insisted)
        if not drained:
            self._progress(f"{process.spec.name} did not drain; its events in flight will be processed again")
        return drained

    async def _retire(self, process: ServiceProcess) -> None:
        await self._drain(process)
        await asyncio.wait({self.running[process]})
        del self.running[process]
        self._state_due.set()

    def state(self) -> FleetState:
        """For `penstock status`."""
        processes = [
            ProcessState(one.spec.name, one.spec.service, one.pid, one.management, one.restarts, str(one.log))
            for one in self.processes
        ]
        plan = self.plan
        where = (plan.broker, str(plan.pipes), plan.listen, plan.observer)
        rest = (plan.keys, plan.registry, VERSION, plan.allow_networks)
        return FleetState(os.getpid(), self.management, *where, processes, *rest)

    async def keep_state(self) -> None:
        """Write the state file after each change. A failed write is logged once and tried again.

        On cancellation it waits for a running write, which would otherwise create the file again after the fleet's end.
        """
        failed = False
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state_due.wait(), STATE_AGAIN_S if failed else None)
            self._state_due.clear()
            writing = asyncio.ensure_future(asyncio.to_thread(_try_to_write, self.plan.data, self.state()))
            try:
                error = await asyncio.shield(writing)
            finally:
                await asyncio.wait({writing})
            if error is not None and not failed:
                self._notify(
                    "error", f"{self.plan.data / STATE_FILE} cannot be written: {error.strerror}. {_STATE_HINT}"
                )
            failed = error is not None

    async def wait_ready(self) -> None:
        """Wait until every process is ready. Raises CommandFailed when one is too late, or when a stop is requested."""
        begun = time.monotonic()
        deadline, say_at = begun + self.plan.ready_within, begun + SAID_AFTER_S
        waiting = self.processes
        async with aiohttp.ClientSession() as session:
            while waiting:
                answers = await asyncio.gather(*(check_ready(session, process) for process in waiting))
                self._stop.check()
                reasons = {
                    process: reason for process, reason in zip(waiting, answers, strict=True) if reason is not None
                }
                for process in waiting:
                    if process not in reasons:
                        self._progress(_describe_ready(process, alone=not reasons))
                waiting = list(reasons)
                if waiting:
                    say_at = self._check_start(reasons, begun, deadline, say_at)
                    await asyncio.sleep(POLL_S)

    def _check_start(
        self, reasons: Mapping[ServiceProcess, str], begun: float, deadline: float, say_at: float
    ) -> float:
        """Say what the start waits for, if it is time to. Returns the time of the next word. Raises CommandFailed after the
        deadline."""
        now, (process, reason) = time.monotonic(), next(iter(reasons.items()))
        if now > deadline:
            lines = "".join(f"\n    {line}" for line in process.last_output)
            raise CommandFailed(
                f"{process.spec.name} was not ready within {self.plan.ready_within:.0f} s: {reason}{lines}",
                f"its log, {process.log}",
            )
        if now < say_at:
            return say_at
        count = len(self.processes)
        so_far = f"{count - len(reasons)} of {count} processes are ready after {now - begun:.0f} s"
        self._progress(f"{so_far}; {process.spec.name}: {reason}")
        return now + max(SAID_AFTER_S, now - begun)

    async def drain(self) -> None:
        """Stop the services in the reverse of START_ORDER, each with a limit. Sets `drained`: whether all drained in time."""
        drained, self.resizable = True, False
        for service in reversed(START_ORDER):
            group = self.processes_of(service)
            if group and not self._stop.insisted.is_set():
                self._progress(f"draining {service}")
            drained &= all(await asyncio.gather(*map(self._drain, group)))
        self.drained = drained


@asynccontextmanager
async def run_fleet(
    plan: FleetPlan, management: str, notify: Notify, progress: Progress, stop: Stop
) -> AsyncIterator[Fleet]:
    """Start everything, wait until it is ready, yield, then drain. No process is left running in any case.

    Raises CommandFailed when a service cannot start or has bad configuration, also while the caller runs.
    """
    token = secrets.token_urlsafe(32)
    try:
        await asyncio.to_thread(write_token, plan.data, token)
    except OSError as error:
        raise CommandFailed(
            f"the data folder {plan.data} cannot be written: {error.strerror}",
            "freeing space there, or --data with another",
        ) from error
    fleet = Fleet(plan, notify, progress, stop)
    routes = GroupControl(fleet, Tokens([token]), whose="the data folder").routes()
    try:
        async with (
            serve_management(management, fleet.why_not_ready, routes) as fleet.management,
            asyncio.TaskGroup() as group,
        ):
            keeper = group.create_task(fleet.keep_state(), name="state file")
            prober = group.create_task(fleet.probes.run(), name="probes")
            fleet.start(group)
            try:
                await fleet.wait_ready()
                fleet.resizable = fleet.started = True
                yield fleet
                await fleet.drain()
            finally:
                tasks = (keeper, prober, *fleet.running.values())
                for task in tasks:
                    if not task.cancelling():  # a second cancel would interrupt the clean-up that the first one began
                        task.cancel()
                await asyncio.wait(tasks)  # otherwise the end of the group would cancel them again
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _describe_ready(process: ServiceProcess, *, alone: bool) -> str:
    """alone: no other process is waited for."""
    accepts = process.spec.service == "ingest" and not alone
    return f"{process.spec.name} is ready" + (
        ": it accepts and stores events; they wait for the others" if accepts else ""
    )


def _refuse_size(service: str, staying: int, leaving: int, seen: int, size: int, open_: bool) -> None:
    """Raise SizeRefused unless a caller that knows the size `seen` may order `size`. One process leaves at a time."""
    if service not in RESIZABLE:
        raise SizeRefused(f"{service} always has the same processes", again=False)
    if not 1 <= size <= RESIZABLE[service]:
        raise SizeRefused(f"{service}: from 1 to {RESIZABLE[service]} processes", again=False)
    if size < seen - 1:
        raise SizeRefused(f"{service}: one process fewer at a time", again=False)
    if not open_:
        raise SizeRefused("the fleet is starting or stopping", again=True)
    if not staying:
        raise SizeRefused(f"this fleet runs no {service}", again=False)
    if seen != staying:
        raise SizeRefused(f"{service} has {staying} processes, not {seen}", again=True)
    if size < seen and leaving:
        raise SizeRefused(f"a process of {service} is draining already", again=True)


def _draining(group: Collection[ServiceProcess]) -> int:
    return sum(one.leaving or one.replacing for one in group)


def _try_to_write(data: Path, state: FleetState) -> OSError | None:
    try:
        write_state(data, state)
    except OSError as error:
        return error
    return None


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: a CommandFailed, else the first one."""
    failed, others = errors.split(CommandFailed)
    error: BaseException | None = failed or others
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None
    return error
