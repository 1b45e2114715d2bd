"""What a transform from Kinesis to Kinesis costs beside the bare job from Kafka to Kafka with the same SQL (`transform.py`).

Kinesis is the emulator: its own CPU is not counted, and it limits how fast a backlog goes. So there is a figure of CPU alone.
"""

import asyncio
from pathlib import Path
from statistics import median

from bench.backlog import fill
from bench.figures import Figure
from bench.ledger_transform import PIPES, WRITTEN, wait_written
from bench.processes import Child, fetch_metric, free_port
from bench.setup import CPU, Setup, make_topics, tell
from bench.transform import Subject, drain, make_backlog
from services.core.aws_emulator import AwsEmulator, use_credentials

WARM, EVENTS = 100_000, 150_000
"""Of a backlog. During the first of them Java still compiles: they are not measured."""
ROUNDS = 3


def kinesis_transform(setup: Setup) -> list[Figure]:
    """Both in turn, each alone."""
    use_credentials()
    folder, bare, ours = setup.folder / "kinesis-transform", [], []
    folder.mkdir()
    rounds = min(setup.rounds, ROUNDS)
    names = [
        f"beside-kinesis-{number}" for number in range(rounds)
    ]  # no names of `transform`, which may have run before
    make_backlog(folder, [setup.kafka], names, WARM + EVENTS)
    with AwsEmulator(folder / "emulator") as emulator:
        for number in range(rounds):
            bare.append(drain(folder, Subject("bare", setup.kafka, None), names[number], WARM, EVENTS).cpu_s)
            ours.append(_measure(folder / f"ours-{number}", emulator.url, f"k{number}"))
            tell(f"transform, Kinesis → Kinesis, round {number + 1}: {ours[-1]:.1f}, bare {bare[-1]:.1f} {CPU}")
    ratio = median(one / other for one, other in zip(ours, bare, strict=True))
    return [Figure("transform, Kinesis → Kinesis", ratio * median(bare), CPU, 2, median(bare))]


def _measure(folder: Path, url: str, stream: str) -> float:
    """stream: one that nobody used yet. CPU-s per million events, of Python and Java."""
    folder.mkdir()
    (folder / "pipes.yaml").write_text(PIPES.replace("EVENTS", stream))
    make_topics(url, folder / "pipes.yaml")
    asyncio.run(fill(url, stream, WARM + EVENTS))
    port = free_port()
    arguments = ("--broker", url, "--pipes", str(folder / "pipes.yaml"), "--data", str(folder))
    with Child(folder, "spark", *arguments, "--management", f"127.0.0.1:{port}") as child:
        child.wait_ready(port, 240.0)
        wait_written(port, WARM)
        before, begun = child.family_cpu(), fetch_metric(port, WRITTEN)
        wait_written(port, WARM + EVENTS)
        return (child.family_cpu() - before) / (WARM + EVENTS - begun) * 1e6
