"""What the transform costs beside a bare Structured Streaming job with the same SQL: a backlog, and a steady stream.

The bare job and ours have the same topics, master, heap, trigger and size of a batch. How much each wrote is read from the
broker. CPU is that of Python and Java together.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.backlog import fill, make_record
from bench.bare_spark import COLUMNS
from bench.figures import Figure
from bench.processes import Child, free_port
from bench.setup import CPU, Setup, make_topics, tell
from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer

WARM, EVENTS = 300_000, 500_000
"""Of a backlog. During the first of them Java still compiles: they are shown, and not measured."""
ROUNDS = 3
RATE, BATCHES_PER_S = 1000, 4
"""Of the steady stream: its batches have 250 events."""
WARM_BATCHES, STEADY_S, PIECE_S = 1000, 60, 5
PATIENCE_S = 600.0
INTERVAL_MS, MAX_EVENTS = 200, 20_000
"""Our defaults, for the bare job as well."""
_LOOK_S = 0.1
_STREAM = "events"
_PIPE = """
  {name}:
    sources: [{stream}]
    transform: {{sql: "SELECT event, id, user, time, note FROM {stream} WHERE price > 0", interval: {interval}ms}}
    destinations: [{{name: hook, webhook: {{url: "http://127.0.0.1:9/"}}}}]
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """seconds, cpu_s: per million events. first_s, first_cpu_s: of the warm-up, in seconds."""

    cpu_s: float
    seconds: float
    first_cpu_s: float
    first_s: float


@dataclass(frozen=True, slots=True)
class Subject:
    """One way to run the SQL. url: of its broker. ledger: None for the bare job."""

    name: str
    url: str
    ledger: bool | None


def transform_figures(setup: Setup) -> list[Figure]:
    """Backlogs on Kafka and on the log, then a steady stream on Kafka."""
    log = setup.log("transform")
    subjects = [
        Subject("bare", setup.kafka, None),
        Subject("kafka", setup.kafka, True),
        Subject("kafka-silent", setup.kafka, False),
        Subject("log", log, True),
        Subject("log-silent", log, False),
    ]
    return [*compare_backlogs(setup, subjects), *compare_steady(setup)]


def compare_backlogs(setup: Setup, subjects: list[Subject]) -> list[Figure]:
    """Each subject alone, in turn."""
    folder = setup.folder / "backlog"
    folder.mkdir()
    rounds = min(setup.rounds, ROUNDS)
    names = [f"{subject.name}-{number}" for number in range(rounds) for subject in subjects]
    make_backlog(folder, {subject.url for subject in subjects}, names, WARM + EVENTS)
    costs: dict[str, list[Cost]] = defaultdict(list)
    for number in range(rounds):
        for subject in subjects if number % 2 == 0 else subjects[::-1]:
            costs[subject.name].append(found := drain(folder, subject, f"{subject.name}-{number}", WARM, EVENTS))
            tell(
                f"transform, {subject.name}, round {number + 1}: {found.cpu_s:.1f} {CPU}, {1e6 / found.seconds:,.0f} events/s; "
                f"the first {WARM:,}: {found.first_cpu_s:.0f} CPU-s in {found.first_s:.0f} s"
            )
    return _backlog_figures(costs)


def _backlog_figures(costs: dict[str, list[Cost]]) -> list[Figure]:
    def figure(name: str, of: str, floor: str, goal: float, value: Callable[[Cost], float], unit: str = CPU) -> Figure:
        """By the median of the rounds' ratios."""
        base = median(value(cost) for cost in costs[floor])
        ratio = median(value(one) / value(other) for one, other in zip(costs[of], costs[floor], strict=True))
        return Figure(name, ratio * base, unit, goal, base)

    found = []
    if "kafka" in costs:
        found.append(figure("transform, Kafka → Kafka", "kafka", "bare", 1.35, lambda cost: cost.cpu_s))
        seconds = "s per million events"
        found.append(
            figure("transform, Kafka → Kafka, time", "kafka", "bare", 1 / 0.75, lambda cost: cost.seconds, seconds)
        )
    if "log" in costs:
        found.append(figure("transform, log → log", "log", "bare", 2, lambda cost: cost.cpu_s))
    found += [
        figure(f"ledger in the transform, {broker}", broker, f"{broker}-silent", 1.05, lambda cost: cost.cpu_s)
        for broker in ("kafka", "log")
        if f"{broker}-silent" in costs
    ]
    return found


def make_backlog(folder: Path, urls: Iterable[str], names: list[str], events: int) -> None:
    """So many events wait, and nothing is in the output topics of these names."""
    for url in urls:
        make_topics(url, _write_pipes(folder / "all.yaml", names, INTERVAL_MS))
        asyncio.run(fill(url, _STREAM, events))


def drain(folder: Path, subject: Subject, name: str, warm: int, events: int) -> Cost:
    """From the start of the process until all that waits is written. warm: events that count as the warm-up."""
    with open_subject(folder, subject, name, INTERVAL_MS) as child:
        return asyncio.run(_watch(child, subject.url, f"{name}.out", warm, events))


async def _watch(child: Child, url: str, topic: str, warm: int, events: int) -> Cost:
    marks: list[tuple[int, float, float]] = []
    """Written events, CPU and time: at the first of them, after the warm-up, at the end."""
    begun = time.monotonic()
    async with open_broker(url) as broker:
        for mark in (1, warm, warm + events):
            while (written := sum(part.end for part in (await broker.reader.describe(topic)).values())) < mark:
                if time.monotonic() - begun > PATIENCE_S:
                    raise RuntimeError(f"not everything was transformed in {PATIENCE_S:.0f} s; see {child.log}")
                await asyncio.sleep(_LOOK_S)
            marks.append((written, child.family_cpu(), time.monotonic()))
    (_, first_cpu, first_at), (base, cpu, at), (end, all_cpu, ended) = marks
    millions = (end - base) / 1e6
    return Cost((all_cpu - cpu) / millions, (ended - at) / millions, cpu - first_cpu, at - first_at)


def compare_steady(setup: Setup) -> list[Figure]:
    """Both jobs at the same time, from one stream: what else the machine does concerns both."""
    folder = setup.folder / "steady"
    folder.mkdir()
    bare, ours = Subject("bare", setup.kafka, None), Subject("kafka", setup.kafka, True)
    names = {"steady-bare": bare, "steady-kafka": ours}
    stream = "steady"
    make_topics(setup.kafka, _write_pipes(folder / "all.yaml", list(names), 1000 // BATCHES_PER_S, stream))
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(open_subject(folder, subject, name, 1000 // BATCHES_PER_S, stream))
            for name, subject in names.items()
        }
        begun = time.monotonic()
        while min(_last_batch(folder, name) for name in names) < WARM_BATCHES:
            if time.monotonic() - begun > PATIENCE_S:
                raise RuntimeError(f"not {WARM_BATCHES} batches in {PATIENCE_S:.0f} s; see {folder}")
            asyncio.run(_send_steadily(setup.kafka, stream, PIECE_S))
        before = {name: (child.family_cpu(), _last_batch(folder, name)) for name, child in children.items()}
        asyncio.run(_send_steadily(setup.kafka, stream, STEADY_S))
        after = {name: (child.family_cpu(), _last_batch(folder, name)) for name, child in children.items()}
    used = {name: after[name][0] - before[name][0] for name in names}
    batches = {name: after[name][1] - before[name][1] for name in names}
    for name in names:
        tell(
            f"transform, {name}: {used[name]:.1f} CPU-s, {batches[name]} batches of {RATE * STEADY_S / batches[name]:.0f} events"
        )
    cost = {name: used[name] / (RATE * STEADY_S) * 1e6 for name in names}
    a_batch = used["steady-kafka"] / batches["steady-kafka"] * 1e3
    return [
        Figure(f"transform, {RATE:,} events/s", cost["steady-kafka"], CPU, 1.35, cost["steady-bare"]),
        Figure(f"transform, a batch of {RATE // BATCHES_PER_S} events", a_batch, "ms of CPU", 100),
    ]


@contextmanager
def open_subject(folder: Path, subject: Subject, name: str, interval_ms: int, stream: str = _STREAM) -> Iterator[Child]:
    """The job, begun: it reads the stream from its start, writes to `name.out`, and has its checkpoint in `folder/name`."""
    own = folder / name
    own.mkdir()
    if subject.ledger is None:
        options = (subject.url.removeprefix("kafka://"), stream, f"{name}.out", str(_checkpoint(folder, name)))
        with Child(own, "bench.bare_spark", *options, str(interval_ms), str(MAX_EVENTS)) as child:
            yield child
        return
    port, pipes = free_port(), _write_pipes(own / "pipes.yaml", [name], interval_ms, stream)
    arguments = ("--broker", subject.url, "--pipes", str(pipes), "--data", str(own), "--ledger", str(subject.ledger))
    with Child(own, "spark", *arguments, "--management", f"127.0.0.1:{port}") as child:
        yield child


def _checkpoint(folder: Path, name: str) -> Path:
    """Where ours puts it, too."""
    return folder / name / "checkpoints" / name


def _last_batch(folder: Path, name: str) -> int:
    commits = _checkpoint(folder, name) / "commits"
    return max((int(path.name) for path in commits.glob("[0-9]*")), default=-1)


def _write_pipes(path: Path, names: list[str], interval_ms: int, stream: str = _STREAM) -> Path:
    streams = f'version: 1\nstreams:\n  {stream}: {{id: id, key: user, time: time, columns: "{COLUMNS}"}}\npipes:'
    pipes = (_PIPE.format(name=name, interval=interval_ms, stream=stream) for name in names)
    path.write_text(streams + "".join(pipes))
    return path


async def _send_steadily(url: str, stream: str, seconds: int) -> None:
    """In pieces of a twentieth of a second."""
    piece = RATE // 20
    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        begun = time.monotonic()
        for number in range(seconds * 20):
            await asyncio.sleep(begun + number / 20 - time.monotonic())
            now = time.time_ns() // 1_000_000
            records = [make_record(sent, now, 0, sent) for sent in range(number * piece, (number + 1) * piece)]
            (await producer.send(stream, records)).raise_first()
