"""A destination that is down for longer than local retries last, and the retry streams with it: rows 12 and 13."""

import asyncio
import time
from pathlib import Path

from services.core.pipe_file.topic_names import retry_topic
from tests.faults.conftest import Report
from tests.faults.fleet import wait_until
from tests.faults.trial import open_trial

RETRY: object = {"attempts": 2, "base": "50ms", "max_wait": "100ms"}
SCHEDULE: object = ["1s", *["2s"] * 20]
"""The schedule of days, in seconds: it outlasts the outage and the ramp after it."""


async def test_destination_down_while_retrier_and_expel_are_killed(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, an outage of a receiver loses events, ends them in dead letters early, or forgets them in a crash."""
    name = "12 receiver down, retrier and expel killed"
    async with open_trial(name, url, tmp_path, rate=60, batch=5, retry=RETRY, schedule=SCHEDULE) as trial:
        services = [await trial.start_retrier(), await trial.start_expel()]
        await trial.start_ingest()
        async with trial.load():
            await wait_until(lambda: len(trial.sink.firsts) > 20)
            trial.sink.fail = 1.0
            for round_number in range(4):
                await asyncio.sleep(trial.chance.uniform(1.0, 2.0))
                victim = services[round_number % 2]
                await victim.kill()
                await victim.start()
                await victim.wait_ready()
            trial.sink.fail = 0.0
            struck = time.monotonic()
        await wait_until(lambda: not trial.ledger.lost())
        trial.recovery = time.monotonic() - struck
        (held,) = (await trial.broker.reader.describe(retry_topic(trial.pipe))).values()
        assert held.end, "nothing came back from the retrier: the trial proves nothing"
        trial.evidence["retried by schedule"] = held.end
        await trial.settle()
        assert not trial.ledger.dead
        report(await trial.judge(strikes=2))
