"""Collects the facts about a whole fleet, of all parts at once, and of each for a limited time."""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.snapshot import original_of
from services.core.process.targets import NoTargets, find_targets
from services.core.yaml_source import BadConfiguration
from services.fleet.access import find_broker, find_pipes
from services.fleet.doctor.collectors.bounds import bounded, describe, in_thread
from services.fleet.doctor.collectors.broker import collect_broker
from services.fleet.doctor.collectors.files import (
    collect_checkpoints,
    collect_disks,
    collect_folder,
    collect_secrets,
    collect_snapshot,
)
from services.fleet.doctor.collectors.network import collect_observer, collect_receivers
from services.fleet.doctor.collectors.processes import collect_processes, instance_of, instances_of
from services.fleet.doctor.facts import Facts, Instance
from services.fleet.folder import OBSERVER_TOKEN_FILE, STATE_FILE, FleetState, read_state
from services.fleet.observer_client import Observer, find_observer
from services.fleet.problem import CommandFailed

SHORT_S, FILES_S, NETWORK_S, PROCESSES_S, BROKER_S = 5.0, 10.0, 10.0, 40.0, 40.0
"""Limits of the collectors."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where the fleet is. targets: of processes on other machines. The other values overrule those of the fleet on `data`."""

    data: Path
    targets: str | None = None
    broker: str | None = None
    pipes: Path | None = None
    observer: str | None = None
    token_file: Path | None = None


async def collect_facts(where: Where, show: Callable[[Collection[str]], None] = lambda _waiting: None) -> Facts:
    """All facts. Takes at most a minute, also when nothing answers. show: gets the names of the collectors that are not done.

    Raises CommandFailed (status 2) when there is no fleet to look at.
    """
    facts = Facts(time.time())
    if where.targets is None:
        await _find_local(facts, where)
    else:
        await _find_remote(facts, where, where.targets)
    await bounded(facts, "the pipe file", SHORT_S, _load_pipes(facts, where))
    works = {"the processes": (PROCESSES_S, collect_processes(facts))}
    if facts.broker.url:
        works["the broker"] = BROKER_S, collect_broker(facts)
    else:
        facts.unknown["the broker"] = "its address is not known. Try: --broker kafka://host:9092"
    address = where.observer or (facts.state.observer if facts.state is not None else None)
    if address is not None:
        works["the observer"] = NETWORK_S, _collect_observer(facts, where, address)
    elif not facts.stopped:
        facts.unknown["the observer"] = "its address is not known. Try: --observer host:port"
    if facts.pipes is not None:
        works["the receivers"] = NETWORK_S, collect_receivers(facts)
    works |= _files(facts)
    waiting = dict.fromkeys(works)
    show(waiting)

    async def run(name: str, limit: float, work: Coroutine[Any, Any, None]) -> None:
        await bounded(facts, name, limit, work)
        del waiting[name]
        show(waiting)

    await asyncio.gather(*(run(name, limit, work) for name, (limit, work) in works.items()))
    return facts


async def _find_local(facts: Facts, where: Where) -> None:
    data = where.data.absolute()
    try:
        async with asyncio.timeout(SHORT_S):
            state, is_there, is_ours = await in_thread(lambda: _read_folder(data))
    except TimeoutError:
        raise CommandFailed(f"the disk of {data} does not answer within {SHORT_S:g} s", "dmesg", status=2) from None
    except OSError as error:
        raise CommandFailed(
            f"the data folder {data} cannot be read: {describe(error)}", "the user that runs the fleet", status=2
        ) from error
    if state is None and not is_there:
        raise CommandFailed(
            f"there is no data folder {data}, so no fleet was started on it",
            "--data with the fleet's folder, or --targets for processes elsewhere",
            status=2,
        )
    facts.data, facts.state, facts.stopped = data, state, state is None
    if not is_ours:
        facts.unknown["the files of the fleet"] = (
            f"{data} belongs to another user. Try: sudo -u '#{data.stat().st_uid}' penstock doctor"
        )
    if state is not None:
        facts.instances = instances_of(state)
        facts.supervisor = Instance("the supervisor", "fleet", state.management, state.pid, 0, 0)
    with suppress(CommandFailed):
        facts.broker.url = await in_thread(lambda: find_broker(where.broker, where.data))


def _read_folder(data: Path) -> tuple[FleetState | None, bool, bool]:
    """The state; whether the folder is there; whether it is this user's. Blocking. Raises OSError."""
    try:
        owner = data.stat().st_uid
    except FileNotFoundError:
        return None, False, True
    state = read_state(data)
    if state is None and (data / STATE_FILE).exists():
        raise OSError(f"{data / STATE_FILE} is no state of a fleet")
    return state, True, os.geteuid() in (0, owner)


async def _find_remote(facts: Facts, where: Where, targets: str) -> None:
    try:
        found = await find_targets(targets)
    except NoTargets as error:
        raise CommandFailed(str(error), status=2) from error
    facts.instances = [instance_of(target) for target in found if target.service != "fleet"]
    facts.supervisor = next((instance_of(target) for target in found if target.service == "fleet"), None)
    facts.broker.url = where.broker or ""


async def _load_pipes(facts: Facts, where: Where) -> None:
    path = await in_thread(lambda: find_pipes(where.pipes, where.data))
    facts.pipes_path = path
    facts.mistakes = await in_thread(lambda: _mistakes_in(original_of(path) or path))
    try:
        facts.pipes = await in_thread(lambda: load_pipes(path))
    except BadConfiguration as error:
        facts.unknown["the pipe file"] = str(error.problems[0])


def _mistakes_in(path: Path) -> tuple[str, ...]:
    """Those of a pipe file; none without a file, because where a fleet is elsewhere there may be none here. Blocking."""
    if not path.exists():
        return ()
    try:
        load_pipes(path)
    except BadConfiguration as error:
        return tuple(map(str, error.problems))
    return ()


async def _collect_observer(facts: Facts, where: Where, address: str) -> None:
    own = where.data / OBSERVER_TOKEN_FILE
    token = where.token_file or (own if facts.state is not None and os.access(own, os.R_OK) else None)
    try:
        observer = await in_thread(lambda: find_observer(address, where.data, token))
    except CommandFailed:  # the token's file; the collector of secrets says what is wrong with it
        observer = Observer(address)
    await collect_observer(facts, observer)


def _files(facts: Facts) -> dict[str, tuple[float, Coroutine[Any, Any, None]]]:
    """The collectors of files of this machine. Each blocks, on a thread of its own."""
    if facts.data is None or "the files of the fleet" in facts.unknown:
        return {}
    collectors: dict[str, Callable[[Facts], None]] = {"the disks": collect_disks, "the data folder": collect_folder}
    if facts.state is not None:
        collectors["the snapshot"] = collect_snapshot
    if facts.pipes is not None:
        collectors |= {"the secrets": collect_secrets, "the checkpoints": collect_checkpoints}
    return {name: (FILES_S, in_thread(partial(one, facts))) for name, one in collectors.items()}
