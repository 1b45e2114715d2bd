"""Retrier and expel killed every few seconds while the receiver fails at random: make soak ARGS="--outage --minutes 5 --rate 200"

Some events are refused for ever and end in the dead letters; what their letters say of the attempts is compared with what
the receiver saw. Exit status 1 when anything was lost, counted wrongly, or came twice too often.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from services.core.event import read_id
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.topic_names import dead_letter_topic, retry_topic
from services.core.undelivered import dead_letter
from tests.faults.fleet import Service
from tests.faults.sink import number_of
from tests.faults.trial import Trial, open_trial
from tests.support.fault_table import HEAD
from tests.support.oracle import Fate

ATTEMPTS = 2
"""Of one round, in place. A crash forgets at most those of the round under way."""
RETRY: object = {"attempts": ATTEMPTS, "base": "50ms", "max_wait": "200ms"}
SCHEDULE: object = ["1s", "2s", "5s", "10s", "10s"]
GAP = (2.0, 5.0)
"""Seconds between two kills; one that has done nothing since its start is spared."""
WORKED = {
    "services.expel": "penstock_expel_attempts_total",
    "services.global_retrier": "penstock_retrier_events_taken_total",
}
BAD_SPELL, GOOD_SPELL = (0.5, 3.0), (2.0, 10.0)
"""Seconds that the receiver answers nothing but 503, and that it fails now and then."""
COMMIT_INTERVAL = "20ms"
"""What a kill of expel repeats at least, in time: a kill every few seconds leaves room for no more."""
USUALLY_FAILS = 0.01
DOOMED = 100
"""One event in so many is refused for ever."""
MOST_TWICE = 0.01
SETTLE_S = 300.0
_PAGE = 500
_LOOK_S, _TELL_S = 2.0, 20.0


@dataclass
class Outage:
    """One run. killed: when (monotonic seconds) expel died; letters: attempts, by event, of each of its dead letters."""

    trial: Trial
    kills: Counter[str] = field(default_factory=Counter)
    killed: list[float] = field(default_factory=list)
    letters: dict[int, list[int]] = field(default_factory=dict)

    async def strike_until(self, end: float) -> None:
        """Kill one or the other every few seconds, and start it again at once."""
        services = list(self.trial.fleet.of("global_retrier")) + list(self.trial.fleet.of("expel"))
        while time.monotonic() < end:
            await asyncio.sleep(self.trial.chance.uniform(*GAP))
            worked = [one for one in services if await _has_worked(one)]
            if not worked:
                continue
            victim = self.trial.chance.choice(worked)
            await victim.kill()
            if victim.module.endswith("expel"):
                self.killed.append(time.monotonic())
            self.kills[victim.name] += 1
            await victim.start()

    async def change_moods(self) -> None:
        """The receiver fails now and then, and at times altogether, until cancelled."""
        sink, chance = self.trial.sink, self.trial.chance
        while True:
            sink.fail = USUALLY_FAILS
            await asyncio.sleep(chance.uniform(*GOOD_SPELL))
            sink.fail = 1.0
            await asyncio.sleep(chance.uniform(*BAD_SPELL))

    async def read_letters(self) -> None:
        """All dead letters of the pipe."""
        reader, topic = self.trial.broker.reader, dead_letter_topic(self.trial.pipe)
        self.letters.clear()
        for partition, held in (await reader.describe(topic)).items():
            offset = held.start
            while offset < held.end and (batch := await reader.read(topic, partition, offset, max_records=_PAGE)):
                for record in batch.records:
                    event_id = read_id(record) or "without an id"
                    self.trial.ledger.bury(event_id)
                    attempts = int(record.header(dead_letter.ATTEMPTS) or b"-1")
                    self.letters.setdefault(number_of(event_id), []).append(attempts)
                offset = batch.offsets[-1] + 1

    async def wait_settled(self) -> float:
        """Until every acknowledged event arrived or was buried, at most SETTLE_S; how long it took."""
        began, told = time.monotonic(), time.monotonic()
        while time.monotonic() - began < SETTLE_S:
            await self.read_letters()
            left = self.trial.ledger.lost()
            if not left:
                break
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                print(f"{len(left)} on their way: {left[:5]}", flush=True)
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began

    def forgotten(self) -> Counter[int]:
        """How many letters are short of so many of the attempts that the receiver saw."""
        tries = self.trial.sink.tries
        return Counter(len(tries[n]) - max(counts) for n, counts in self.letters.items() if n in tries)

    def _is_true(self, number: int) -> bool:
        """Whether its letter's count is the receiver's, but for the round that each death of expel may have cut off."""
        seen, told = self.trial.sink.tries.get(number), max(self.letters[number])
        if seen is None:
            return True
        deaths = sum(1 for at in self.killed if seen[0] <= at <= seen[-1])
        return len(seen) - ATTEMPTS * deaths <= told <= len(seen)

    def _describe(self, number: int) -> str:
        return f"event {number}: {len(self.trial.sink.tries[number])} seen, letters say {self.letters[number]}"

    def complaints(self) -> list[str]:
        """Every way in which the promise is broken."""
        ledger = self.trial.ledger
        found = ledger.complaints()
        own, _ = ledger.duplicates()
        letters = sum(len(counts) - 1 for counts in self.letters.values())
        if own + letters > MOST_TWICE * ledger.count(Fate.OBLIGED):
            found.append(f"{own} arrived twice, {letters} were buried twice")
        wrong = [self._describe(number) for number in self.letters if not self._is_true(number)]
        if len(wrong) > MOST_TWICE * len(self.letters):
            found.append(f"{len(wrong)} letters with a wrong count: {wrong[:5]}")
        if len(self.kills) < 2 or not self.letters:
            found.append("not both were killed, or nothing was buried: the run proves nothing")
        return found


async def _has_worked(service: Service) -> bool:
    return service.is_running and await service.metric(WORKED[service.module]) > 0


async def soak(minutes: float, rate: float, seed: int, url: str, folder: Path) -> int:
    """Run it and print the row. The exit status."""
    name = "soak, receiver fails, retrier and expel killed"
    async with open_trial(name, url, folder, seed=seed, rate=rate, retry=RETRY, schedule=SCHEDULE) as trial:
        trial.sink.dooms, trial.sink.keeps_order = lambda number: number % DOOMED == 0, False
        run = Outage(trial)
        await trial.start_retrier()
        await trial.start_expel("expel-1", "--commit-interval", COMMIT_INTERVAL)
        await trial.start_ingest()
        moods = asyncio.create_task(run.change_moods())
        async with trial.load():
            await run.strike_until(time.monotonic() + 60 * minutes)
        moods.cancel()
        trial.sink.fail = 0.0
        trial.recovery = await run.wait_settled()
        trial.sink.dooms = lambda _number: False  # what is sent to see whether anything gets through is to arrive
        if not trial.ledger.lost():
            await trial.settle()
        (held,) = (await trial.broker.reader.describe(retry_topic(trial.pipe))).values()
        print(HEAD)
        row = trial.row()
        print(row.text())
        print(f"{minutes:g} minutes at {rate:g}/s, kills {dict(run.kills)}, {held.end} came back from the retrier")
        print(
            f"{len(run.letters)} dead, attempts short of what the receiver saw: {dict(sorted(run.forgotten().items()))}"
        )
        print(f"came twice: {row.share:.2%}; buried twice: {sum(len(counts) - 1 for counts in run.letters.values())}")
        complaints = run.complaints()
        for text in complaints:
            print("FAILED:", text)
        return 1 if complaints else 0


def run(minutes: float, rate: float, seed: int, *, kafka: bool) -> int:
    """On a log or a Kafka of its own. The exit status."""
    with tempfile.TemporaryDirectory(prefix="penstock-soak-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        cluster = stack.enter_context(KafkaCluster(folder / "kafka", brokers=1)) if kafka else None
        url = f"kafka://{cluster.bootstrap}" if cluster is not None else f"log://{folder / 'log'}"
        return asyncio.run(soak(minutes, rate, seed, url, folder))


if __name__ == "__main__":
    sys.exit("Try: make soak ARGS=--outage")
