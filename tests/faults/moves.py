"""Moves of a live stream by the real command, while processes of the fleet and the command itself are killed."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from services.core.broker.several.broker import SeveralBrokers
from services.core.control.homes import Homes
from services.core.fleet_broker import open_with_homes
from services.core.jvm.child import start_child, stop_child
from services.core.pipe_file.pipes import load_pipes
from tests.faults.fleet import DEADLINE, Service, wait_until
from tests.faults.trial import Trial, open_trial, read_dead_letters
from tests.support.fault_table import Row

_LINGER_S = 1.0
_FAILURES = 20


class History(NamedTuple):
    """killed: by victim, and the state of the migration at that moment. refused: the output of each command that failed."""

    row: Row
    killed: Counter[str]
    refused: list[str]


class _Mover:
    """Runs the command; kills it, and the services, at random moments."""

    def __init__(self, trial: Trial, pipes: Path, homes: Homes) -> None:
        self._trial, self._pipes, self._homes = trial, pipes, homes
        self.killed: Counter[str] = Counter()
        self.refused: list[str] = []
        self.runs = 0

    async def move(self, *action: str, kills: int) -> None:
        """Until the command has succeeded. It is run again when it was killed, or has failed."""
        trial = self._trial
        while True:
            self.runs += 1
            log = trial.folder / f"migrate-{self.runs}.log"
            command = await asyncio.to_thread(start_child, self._command(*action), log=log)
            try:
                ended = asyncio.create_task(asyncio.to_thread(command.wait, DEADLINE))
                kills = await self._strike(command, ended, kills)
                if await ended == 0:
                    return
            finally:
                await asyncio.to_thread(stop_child, command, grace_s=0)
            if command.returncode > 0:
                self.refused.append(log.read_text()[-2000:])
                assert len(self.refused) < _FAILURES, self.refused[-1]
                if "--undo" in self.refused[-1] and "--undo" not in action:
                    await self.move("--undo", kills=0)

    def _command(self, *action: str) -> list[str]:
        trial = self._trial
        shared = ["--pipes", str(self._pipes), "--broker", trial.url, "--data", str(trial.folder / "none"), "--json"]
        return [sys.executable, "-m", "services.fleet", "migrate", trial.stream, *action, *shared]

    async def _strike(self, command: subprocess.Popen[bytes], ended: "asyncio.Task[int]", kills: int) -> int:
        """Kill until the command has ended. Gives the number of kills that are left."""
        chance = self._trial.chance
        while kills:
            done, _ = await asyncio.wait([ended], timeout=chance.uniform(0.3, 3.5))
            if done:
                break
            kills -= 1
            services = list(self._trial.fleet.services.values())
            number = chance.randrange(len(services) + 2)  # the command twice as often as each service
            victim = services[number] if number < len(services) else None
            self.killed[
                f"{victim.module if victim else 'command'} in {self._homes.home(self._trial.stream).state}"
            ] += 1
            if victim is None:
                command.kill()
                break
            await self._kill(victim)
        return kills

    async def _kill(self, victim: Service) -> None:
        if victim.is_running:
            await victim.kill()
        await victim.start()


async def run_history(
    fault: str,
    url: str,
    brokers: Mapping[str, str],
    folder: Path,
    *,
    kills: int,
    rate: float = 200,
    seed: int | None = None,
) -> History:
    """There and back, then there again and to its end, under load, with at most so many kills in each of the three moves.

    brokers: the one that the stream moves to is `second`.
    """
    async with AsyncExitStack() as stack:
        trial = await stack.enter_async_context(
            open_trial(fault, url, folder, rate=rate, batch=5, brokers=brokers, seed=seed)
        )
        pipes = trial.write_pipes()
        fleet = await stack.enter_async_context(open_with_homes(url, await asyncio.to_thread(load_pipes, pipes)))
        assert isinstance(fleet, SeveralBrokers)
        homes = fleet.brokers.places
        assert isinstance(homes, Homes)
        starting = [trial.start_ingest(f"ingest-{number}") for number in (1, 2)]
        starting += [trial.start_expel(f"expel-{number}") for number in (1, 2)]
        await asyncio.gather(*starting)
        mover = _Mover(trial, pipes, homes)
        began = time.monotonic()
        async with trial.load():
            for to in ("second", "default", "second"):
                await mover.move("--to", to, kills=kills)
                await wait_until(lambda to=to: homes.home(trial.stream).readers == to)
                await trial.sender.insist_on_one()
        trial.gap = trial.sender.longest_gap(began, time.monotonic())
        await mover.move("--finish", kills=0)
        for service in trial.fleet.services.values():
            await service.wait_ready()
        number = await trial.sender.insist_on_one()
        await wait_until(lambda: trial.ledger.arrived(number) and not trial.ledger.lost())
        await asyncio.sleep(_LINGER_S)
        assert trial.stream not in await trial.broker.admin.topics(), "the former topic is still there"
        await read_dead_letters(trial.broker, f"{trial.pipe}.dead", trial.ledger)
        trial.evidence["kills"] = mover.killed.total()
        print("killed:", dict(mover.killed), "refused:", [last_words(one) for one in mover.refused])
        return History(await trial.judge(strikes=mover.killed.total() + 3), mover.killed, mover.refused)


def last_words(refused: str) -> str:
    """The error of a command, on one line."""
    lines = [line for line in refused.splitlines() if line.strip()]
    return lines[0] if lines else json.dumps(refused)
