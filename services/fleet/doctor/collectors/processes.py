"""Looks at the processes: the operating system, their management ports, their metrics, their logs."""

import asyncio
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import aiohttp
import orjson
import psutil

from services.core.process.scrape import Sample, scrape
from services.core.process.targets import Target
from services.fleet.doctor.collectors.bounds import in_thread
from services.fleet.doctor.facts import Facts, Instance, LogLine
from services.fleet.folder import FleetState, read_state
from services.fleet.up.output import describe_line

PROBE = aiohttp.ClientTimeout(total=4.0, sock_connect=2.0)
WINDOW_S = 5.0
"""The time between the two readings of the metrics."""
LOG_BYTES = 300_000
LOG_LINES = 400


def instances_of(state: FleetState) -> list[Instance]:
    """The processes of a fleet on this machine, as its state file lists them."""
    return [
        Instance(one.name, one.service, one.management, one.pid, one.restarts, one.restarts, Path(one.log))
        for one in state.processes
    ]


def instance_of(target: Target) -> Instance:
    """A process of a list of targets."""
    service = "retrier" if target.service == "global-retrier" else target.service  # the name of its deployment
    return Instance(target.name or target.address, service, target.address)


async def collect_processes(facts: Facts) -> None:
    """Two readings of every process and of the supervisor, WINDOW_S apart. One that did not answer is asked again."""
    every = [*facts.instances, *([] if facts.supervisor is None else [facts.supervisor])]
    await asyncio.gather(*map(_collect_instance, every))
    if facts.supervisor is not None and facts.supervisor.age is not None:
        facts.started = facts.now - facts.supervisor.age
    await asyncio.sleep(WINDOW_S)
    data, state = facts.data, facts.state
    if data is not None and state is not None:
        _count_restarts(facts, await in_thread(lambda: read_state(data)))
    await asyncio.gather(*map(_read_again, every))


async def _collect_instance(one: Instance) -> None:
    await in_thread(lambda: _collect_process(one))
    await _ask(one)
    if one.answers:
        one.first = await _scrape(one)
        if not one.service and one.first is not None:
            one.service = _service_in(one.first)
    if one.log is not None:
        path = one.log
        one.lines = await in_thread(lambda: tail(path))


def _count_restarts(facts: Facts, later: FleetState | None) -> None:
    found = {} if later is None else {one.name: one for one in later.processes}
    for one in facts.instances:
        now = found.get(one.name)
        if now is None:
            continue
        one.restarts_later = now.restarts
        if now.pid != one.pid and not one.answers:  # it was started meanwhile, and has another port
            one.pid, one.address = now.pid, now.management


async def _read_again(one: Instance) -> None:
    if not one.answers:
        await in_thread(lambda: _collect_process(one))
        await _ask(one)
    if one.answers:
        found = await _scrape(one)
        if one.first is None:
            one.first = found
        else:
            one.second = found


def _collect_process(one: Instance) -> None:
    if one.pid is None:
        one.status, one.age = ("gone", None) if one.is_local else ("", None)
        return
    try:
        process = psutil.Process(one.pid)
        one.status, one.age = process.status(), max(0.0, time.time() - process.create_time())
    except psutil.NoSuchProcess:
        one.status, one.age = "gone", None
    except psutil.Error:
        one.status = ""


async def _ask(one: Instance) -> None:
    if not one.address:
        return
    try:
        async with aiohttp.ClientSession(timeout=PROBE) as session:
            async with session.get(f"http://{one.address}/readyz", allow_redirects=False) as response:
                _read_answer(one, response, await response.read())
            async with session.get(f"http://{one.address}/healthz", allow_redirects=False) as response:
                text = (await response.text())[:300].strip()
                one.unhealthy = "" if response.status == 200 else text or f"status {response.status}"
    except aiohttp.ConnectionTimeoutError:
        one.answer, one.reason = "refused", "no connection within 2 s"
    except TimeoutError:
        one.answer, one.reason = "silent", "it accepts the connection and does not answer within 4 s"
    except (aiohttp.ClientConnectionError, OSError) as error:
        one.answer, one.reason = "refused", "nobody listens there" if "refused" in str(error).lower() else str(error)
    except aiohttp.ClientError as error:
        one.answer, one.reason = "not ready", f"its answer is not HTTP: {error}"


def _read_answer(one: Instance, response: aiohttp.ClientResponse, body: bytes) -> None:
    try:
        found = orjson.loads(body)
        reason = found.get("reason") if isinstance(found, dict) else "its answer is not that of a Penstock service"
    except orjson.JSONDecodeError:
        reason = "its answer is not that of a Penstock service"
    one.answer = "ready" if response.status == 200 and not reason else "not ready"
    one.reason = str(reason or ("" if one.answer == "ready" else f"status {response.status}"))
    one.skew = skew_of(response.headers.get("Date"), time.time())


def skew_of(date: str | None, now: float) -> float | None:
    """Seconds by which the clock of an HTTP Date is ahead of `now`; None without a readable date. A second exact at best."""
    if date is None:
        return None
    try:
        return parsedate_to_datetime(date).timestamp() - now
    except (ValueError, TypeError):
        return None


async def _scrape(one: Instance) -> Sample | None:
    sample = await scrape([one.address])
    return sample if sample.values else None


def _service_in(sample: Sample) -> str:
    """The service that a process says it is; a list of targets may not have it."""
    return next((labels.get("service", "") for labels, _ in sample.children("penstock_build_info")), "")


def tail(path: Path) -> tuple[LogLine, ...]:
    """The last lines of a log, oldest first; none when it cannot be read. Blocking."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_BYTES))
            lines = file.read().splitlines()[-LOG_LINES:]
    except OSError:
        return ()
    return tuple(parse_line(line) for line in lines if line.strip())


def parse_line(line: bytes) -> LogLine:
    """One line of a log; secrets in it are masked."""
    level, text = describe_line(line)
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return LogLine(0.0, "", "", text)
    if not isinstance(entry, dict) or "event" not in entry:
        return LogLine(0.0, "", "", text)
    try:
        at = datetime.fromisoformat(str(entry.get("timestamp"))).timestamp()
    except ValueError:
        at = 0.0
    return LogLine(at, level, str(entry["event"]), text, entry)
