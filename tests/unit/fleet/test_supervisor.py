"""The supervisor: services that die come back, stop in order, and never outlive it. Each process is a real one."""

import asyncio
import errno
import functools
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Never

import backoff
import psutil
import pytest

from services.core.broker.log.data_folder import refuse_network
from services.core.process.management import serve_management
from services.fleet.folder import FleetState, lock_folder, read_state, write_state
from services.fleet.problem import CommandFailed
from services.fleet.stop import Stop
from services.fleet.up import probe
from services.fleet.up.plan import FleetPlan
from services.fleet.up.ports import free_port
from services.fleet.up.probe import Probes
from services.fleet.up.process import ServiceProcess, ServiceSpec
from services.fleet.up.supervisor import Fleet, run_fleet
from tests.unit.fleet.sample_service import HANGS, LET_GO, MODE_FILE

DEADLINE = 600.0
MODULE = "tests.unit.fleet.sample_service"


class Bench:
    """A data folder, the notes that the sample services leave, and what the console was told."""

    def __init__(self, data: Path) -> None:
        self.data, self.notes_file, self.said, self.stop = data, data / "notes", list[str](), Stop()
        self.levels: set[str] = set()
        (data / "logs").mkdir()

    def run(
        self, *services: str, mode: str = "", ready_within: float = DEADLINE, drain: float = 600.0
    ) -> AbstractAsyncContextManager[Fleet]:
        arguments = ("--drain", f"{drain:.0f}s")
        specs = tuple(
            ServiceSpec(f"{service}-1", service, MODULE, ("--name", service, *arguments), self.environ(mode))
            for service in services
        )
        plan = FleetPlan(self.data, "log:///x", Path("/p"), "127.0.0.1:1", "127.0.0.1:2", specs, ready_within, drain)
        return run_fleet(plan, "127.0.0.1:0", self._say, self.said.append, self.stop)

    def _say(self, level: str, text: str) -> None:
        self.levels.add(level)
        self.said.append(text)

    def environ(self, mode: str) -> dict[str, str]:
        return {"SAMPLE_NOTES": str(self.notes_file), "SAMPLE_MODE": mode, "PYTHONPATH": str(Path.cwd())}

    def notes(self) -> list[str]:
        return self.notes_file.read_text().splitlines() if self.notes_file.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.02)
    assert condition(), what


async def until_state(bench: Bench, condition: Callable[[FleetState], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while (state := await asyncio.to_thread(read_state, bench.data)) is None or not condition(state):
            await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_ready_then_drained_in_order(bench: Bench) -> None:
    """Broken: expel stops before the events of the last accepted requests have passed, or a stop loses work."""
    async with bench.run("expel", "transform", "ingest") as fleet:
        pids = [process.pid for process in fleet.processes]
        await until_state(bench, lambda state: [one.pid for one in state.processes] == pids)
    assert all(pid is not None and not is_alive(pid) for pid in pids)
    assert bench.notes()[-3:] == ["ingest drained", "transform drained", "expel drained"]


async def test_another_program_answers_for_a_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a fleet is called ready before its ingest listens, because another program took the port of ingest."""
    async with serve_management("127.0.0.1:0", lambda: None) as other:
        given = itertools.chain([int(other.rpartition(":")[2])], iter(free_port, 0))
        monkeypatch.setattr("services.fleet.up.process.free_port", lambda: next(given))
        async with bench.run("ingest") as fleet:
            assert fleet.processes[0].management != other
            assert fleet.processes[0].restarts == 1
            assert [line.split()[1] for line in bench.notes()] == ["started", "started"]


async def test_the_state_file_does_not_come_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `penstock status` believes in a fleet that has stopped, because its last write was slow."""
    begun, slow = threading.Event(), False

    def write(data: Path, state: FleetState) -> None:
        if slow:
            begun.set()
            time.sleep(
                2.0
            )  # longer than the drain, unless the machine is very busy: then nothing is tested, and nothing fails
        write_state(data, state)

    monkeypatch.setattr("services.fleet.up.supervisor.write_state", write)
    holding = ExitStack()
    await asyncio.to_thread(holding.enter_context, lock_folder(bench.data))
    async with bench.run("ingest") as fleet:
        await until_state(bench, lambda state: bool(state.processes))
        slow = True
        await fleet.resize("ingest", 1, 2)
        await until(begun.is_set, "a write that the stop finds under way")
    await asyncio.to_thread(holding.close)
    await asyncio.sleep(2.5)
    assert await asyncio.to_thread(read_state, bench.data) is None


async def test_a_dead_service_comes_back_and_is_counted(bench: Bench) -> None:
    """Broken: one crash stops the flow until a person looks."""
    async with bench.run("ingest") as fleet:
        process = fleet.processes[0]
        for deaths in (1, 2):
            pid = process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda seen=pid: process.pid not in (None, seen), "a new process")  # type: ignore[misc]
            assert process.restarts == deaths
            await fleet.wait_ready()
        await until_state(bench, lambda state: state.processes[0].pid == process.pid)
    assert any("ingest-1 was killed by SIGKILL" in line for line in bench.said)


async def test_a_hung_service_is_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a process that hangs stays hung until a person looks; or one that hangs again and again is started as often."""
    monkeypatch.setattr(backoff, "full_jitter", lambda longest: longest)
    monkeypatch.setattr("services.fleet.up.process.HEALTHY_AFTER_S", 3600.0)
    monkeypatch.setattr(probe, "EVERY_S", 0.02)
    monkeypatch.setattr(probe, "ANSWER_S", 2.0)
    monkeypatch.setattr(probe, "BOUND_S", 0.2)
    monkeypatch.setattr(probe, "LEAST_FAILURES", 2)
    async with bench.run("ingest") as fleet:
        (process,) = fleet.processes
        frozen = process.pid
        assert frozen is not None
        await until(lambda: process.alive_at > 0, "a good probe")
        os.kill(frozen, signal.SIGSTOP)
        await until(lambda: process.pid not in (None, frozen), "a new process")
        await fleet.wait_ready()
        hangs = bench.notes_file.with_name(HANGS)
        hangs.touch()
        await until(lambda: process.restarts >= 3, "more restarts")
        hangs.unlink()
        await fleet.wait_ready()
        assert bench.notes().count("ingest drained") >= 2  # one that answers may finish its work
    ends = [line for line in bench.said if "ingest-1 hung and was ended: " in line]
    assert "/healthz gives no answer within 2 s (for " in ends[0]
    assert "it stands still (for " in ends[-1]
    assert [float(line.split("Started again in ")[1].split(" s")[0]) for line in ends[:3]] == [0.2, 0.4, 0.8]


async def test_a_service_that_starts_or_was_frozen_for_a_while_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the supervisor kills a transform that is starting, or a process into which somebody looks with a debugger."""
    monkeypatch.setattr(probe, "EVERY_S", 0.02)
    monkeypatch.setattr(probe, "ANSWER_S", 0.2)
    monkeypatch.setattr(probe, "BOUND_S", 0.0)

    def failures() -> int:
        found = fleets[0].probes.runs.get("ingest-1") if fleets else None
        return 0 if found is None else found.failures

    fleets: list[Fleet] = []
    run = Probes.run

    async def note(self: Probes) -> Never:
        fleets.append(self._end.__self__)  # type: ignore[attr-defined]  # the fleet, before it is ready
        await run(self)

    monkeypatch.setattr(Probes, "run", note)

    async def let_go() -> None:
        await until(lambda: failures() > 2 * probe.LEAST_FAILURES, "failed probes of a process that starts")
        monkeypatch.setattr(probe, "BOUND_S", 3600.0)
        bench.notes_file.with_name(LET_GO).touch()

    letting_go = asyncio.create_task(let_go())
    async with bench.run("ingest", mode="slow") as fleet:
        await letting_go
        (process,) = fleet.processes
        pid = process.pid
        assert pid is not None
        await until(lambda: process.alive_at > 0, "a good probe")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: failures() > 2 * probe.LEAST_FAILURES, "failed probes of a frozen process")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: failures() == 0, "a good probe")
        assert (process.pid, process.restarts) == (pid, 0)


async def test_warnings_reach_the_console_and_all_lines_the_log(bench: Bench) -> None:
    """Broken: an operator sees nothing, everything, or a secret."""
    async with bench.run("ingest"):
        await until(lambda: any("look here" in line for line in bench.said), "the warning")
    assert "ingest-1: look here token=*** count=3" in bench.said
    log = (bench.data / "logs" / "ingest-1.log").read_text()
    assert '"event":"drained"' in log
    assert "drained" not in " ".join(line for line in bench.said if line.startswith("ingest-1:"))


async def test_bad_configuration_ends_the_fleet(bench: Bench) -> None:
    """Broken: what only a person can repair is restarted for ever, and the reason scrolls away."""
    with pytest.raises(CommandFailed, match=r"pipes\.yaml:3: pipes\.p: cannot work") as caught:
        async with bench.run("expel", "ingest", mode="bad"):
            raise AssertionError("must not become ready")
    assert caught.value.status == 2


async def test_bad_configuration_after_a_ready_start(bench: Bench) -> None:
    """Broken: one crash after somebody made a mistake in a file ends every service of the fleet."""
    async with bench.run("expel", "ingest") as fleet:
        expel, ingest = fleet.processes
        kept = ingest.pid
        mode = bench.notes_file.with_name(MODE_FILE)
        mode.write_text("bad")
        assert expel.pid is not None
        os.kill(expel.pid, signal.SIGKILL)
        await until(
            lambda: any("pipes.yaml:3" in line and "fleet continues" in line for line in bench.said), "the line"
        )
        assert "critical" in bench.levels
        mode.unlink()
        await until(lambda: expel.pid is not None and expel.restarts >= 2, "a start after the repair")
        await fleet.wait_ready()
        assert ingest.pid == kept


async def test_a_full_disk_stops_no_fleet(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: with the disk full, the first restart of any service ends the supervisor, and every service with it."""
    full = False

    def write(data: Path, state: FleetState) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_state(data, state)

    monkeypatch.setattr("services.fleet.up.supervisor.write_state", write)
    monkeypatch.setattr("services.fleet.up.supervisor.STATE_AGAIN_S", 0.1)
    async with bench.run("expel", "ingest") as fleet:
        expel, ingest = fleet.processes
        kept, full = ingest.pid, True
        for deaths in (1, 2):
            pid = expel.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda seen=pid: expel.pid not in (None, seen), "a new process")  # type: ignore[misc]
            assert expel.restarts == deaths
            await fleet.wait_ready()
        await until(lambda: any("fleet.json cannot be written" in line for line in bench.said), "the line")
        assert ingest.pid == kept
        full = False
        await until_state(bench, lambda state: [one.pid for one in state.processes] == [expel.pid, kept])
    assert sum("fleet.json cannot be written" in line for line in bench.said) == 1


async def test_no_memory_for_a_restart(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: when no process can be started for a moment, every service that works is ended."""
    async with bench.run("expel", "ingest") as fleet:
        expel, ingest = fleet.processes
        kept, refused = ingest.pid, list[int]()
        start = ServiceProcess._start

        async def refuse_twice(self: ServiceProcess, output: int) -> asyncio.subprocess.Process:
            if len(refused) < 2:
                refused.append(output)
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return await start(self, output)

        monkeypatch.setattr(ServiceProcess, "_start", refuse_twice)
        assert expel.pid is not None
        os.kill(expel.pid, signal.SIGKILL)
        await until(lambda: len(refused) == 2 and expel.pid is not None, "a new process")
        await fleet.wait_ready()
        assert ingest.pid == kept
    assert any("expel-1 could not be started: Cannot allocate memory" in line for line in bench.said)


async def test_never_ready_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `penstock up` hangs, or says only that something failed, or nothing while it waits."""
    monkeypatch.setattr("services.fleet.up.supervisor.SAID_AFTER_S", 0.3)
    assert "ingest-1 was not ready within" in await fail_to_start(bench, "unready", "s: still warming up")
    waits = [line for line in bench.said if line.startswith("0 of 1 processes are ready after ")]
    assert " s; ingest-1: " in waits[-1]  # the reason, which on a busy machine is that it does not answer yet
    await fail_to_start(bench, "crash", "boom")


async def test_ingest_is_told_to_be_ready_before_the_others(bench: Bench) -> None:
    """Broken: events may be sent minutes before Spark runs, and nobody knows."""

    async def run() -> None:
        async with bench.run("expel", "ingest", mode="slow:expel"):
            pass

    running = asyncio.create_task(run())
    early = "ingest-1 is ready: it accepts and stores events; they wait for the others"
    await until(lambda: early in bench.said or running.done(), "the line")
    assert "expel-1 is ready" not in bench.said
    bench.notes_file.with_name(LET_GO).touch()
    await running
    assert "expel-1 is ready" in bench.said


async def fail_to_start(bench: Bench, mode: str, reason: str) -> str:
    """What is said when it never becomes ready; again with more time where the process had not even begun to run."""
    for seconds in (1.0, 5.0, 30.0, 300.0):
        with pytest.raises(CommandFailed) as caught:
            async with bench.run("ingest", mode=mode, ready_within=seconds):
                raise AssertionError("must not become ready")
        if reason in str(caught.value):
            break
    assert reason in str(caught.value)
    return str(caught.value)


async def test_a_start_that_fails_while_the_fleet_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: with no process left on the machine, `penstock up` starts a service again while it ends, and never ends itself."""
    starting, may_fail = asyncio.Event(), asyncio.Event()

    async def fail(*_: object) -> Never:
        starting.set()
        await may_fail.wait()
        raise OSError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(ServiceProcess, "_start", fail)
    spec = ServiceSpec("ingest-1", "ingest", MODULE, ())
    process = ServiceProcess(spec, bench.data / "logs", bench._say, lambda: None, lambda: False)
    running = asyncio.create_task(process.keep_running())
    await starting.wait()
    running.cancel()
    await asyncio.sleep(0)
    may_fail.set()
    async with asyncio.timeout(DEADLINE):
        await asyncio.wait({running})
    assert running.cancelled()


async def test_restarts_wait_longer_and_longer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a service that crashes at start takes a whole core for starting it again and again."""
    monkeypatch.setattr(backoff, "full_jitter", lambda longest: longest)
    monkeypatch.setattr("services.fleet.up.process.HEALTHY_AFTER_S", 3600.0)
    with pytest.raises(CommandFailed):
        async with bench.run("ingest", mode="crash", ready_within=3.0):
            raise AssertionError("must not become ready")
    waits = [float(line.split("Started again in ")[1].split(" s")[0]) for line in bench.said if "Started again" in line]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2][: len(waits)]


async def test_a_stuck_service_is_killed(bench: Bench) -> None:
    """Broken: a service that ignores SIGTERM keeps Ctrl-C from ever ending."""
    async with bench.run("ingest", mode="stuck") as fleet:
        pid = fleet.processes[0].pid
        asyncio.get_running_loop().call_later(1.0, bench.stop.insisted.set)
    assert pid is not None
    assert not is_alive(pid)
    assert "ingest-1 did not drain; its events in flight will be processed again" in bench.said


async def test_stop_while_a_killed_service_starts_again(bench: Bench) -> None:
    """Broken: `penstock up` says that events were left, and fails, because a process that had not begun ended at SIGTERM."""
    async with bench.run("ingest") as fleet:
        [process] = fleet.processes
        killed = process.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: process.pid not in (None, killed), "another process")
    assert fleet.drained
    assert not [line for line in bench.said if "did not drain" in line]


async def test_stop_while_starting(bench: Bench) -> None:
    """Broken: Ctrl-C during the start leaves processes behind."""

    async def stop_when_started() -> None:
        await until(bench.notes, "the start")
        bench.stop.request()

    async with asyncio.TaskGroup() as group:
        group.create_task(stop_when_started())
        with pytest.raises(CommandFailed) as caught:
            async with bench.run("ingest", mode="unready"):
                raise AssertionError("must not become ready")
    assert caught.value.status == 130
    assert not is_alive(int(bench.notes()[0].split()[-1]))


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Broken: after kill -9 of the supervisor, orphans go on taking events and hold the port."""
    program = f"""
        import asyncio, os
        from pathlib import Path
        from tests.unit.fleet.test_supervisor import Bench
        async def main():
            async with Bench(Path({str(tmp_path)!r})).run("ingest") as fleet:
                print(fleet.processes[0].pid, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert is_alive(pid)
        supervisor.kill()
    deadline = time.monotonic() + DEADLINE
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_fleet_a_folder(tmp_path: Path) -> None:
    """Broken: two fleets write to one log and checkpoint, each believing it is alone."""
    with (
        lock_folder(tmp_path / "data"),
        pytest.raises(CommandFailed, match="another fleet"),
        lock_folder(tmp_path / "data"),
    ):
        raise AssertionError("must not be entered")
    with lock_folder(tmp_path / "data"):
        pass


def test_folder_that_cannot_be(tmp_path: Path) -> None:
    """Broken: a typo in --data gives a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandFailed, match="Not a directory") as caught, lock_folder(tmp_path / "file" / "data"):
        raise AssertionError("must not be entered")
    assert caught.value.status == 2


def test_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: locks and fsync are trusted where they do not hold."""
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/export {tmp_path} nfs4 rw 0 0\n"
    monkeypatch.setattr("services.fleet.folder.refuse_network", functools.partial(refuse_network, mounts=mounts))
    with pytest.raises(CommandFailed, match="network file system") as caught, lock_folder(tmp_path / "data"):
        raise AssertionError("must not be entered")
    assert caught.value.status == 2
