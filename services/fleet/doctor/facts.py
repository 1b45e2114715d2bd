"""What the collectors found of a fleet. The checks read these facts; no check asks anybody."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.core.broker.contract import Lag
from services.core.broker.record import TopicPartition
from services.core.control.pauses import Pause
from services.core.control.transform_marks import TransformMark
from services.core.group_report import GroupReport
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import delivery_group, lane_name
from services.core.process.scrape import Sample
from services.fleet.folder import FleetState

Answer = Literal["ready", "not ready", "silent", "refused"]
"""Of a management port. silent: it accepts the connection and does not answer. refused: nobody listens there."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a service's log. at: seconds since the epoch; 0 for a line that is not of our log format, whose level is ""."""

    at: float
    level: str
    event: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Instance:
    """One process. pid: None while it does not run, or unknown. restarts: None where nobody counts them.

    reason: why it is not ready, for a person. unhealthy: the text of /healthz when its status is not 200. skew: seconds by which
    its clock is ahead of ours; None: unknown. status: of the operating system (psutil's word); "" where it is unknown. age:
    seconds since its start. first, second: its metrics, some seconds apart.
    """

    name: str
    service: str
    address: str
    pid: int | None = None
    restarts: int | None = None
    restarts_later: int | None = None
    log: Path | None = None
    answer: Answer = "refused"
    reason: str = ""
    unhealthy: str = ""
    skew: float | None = None
    status: str = ""
    age: float | None = None
    first: Sample | None = None
    second: Sample | None = None
    lines: tuple[LogLine, ...] = ()

    @property
    def answers(self) -> bool:
        return self.answer in ("ready", "not ready")

    @property
    def is_local(self) -> bool:
        """Whether the process is on this machine, under a supervisor."""
        return self.restarts is not None

    def said(self, *events: str, **fields: str) -> list[str]:
        """As evidence: the newest line of its log with one of these events and these fields, if there is one."""
        lines = [one for one in self.lines if one.event in events and fields.items() <= one.fields.items()]
        return [f"its log: {line.text[:300]}" for line in lines[-1:]]


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that holds files of the fleet. path: of one of them. Bytes; free: for this user."""

    path: Path
    free: int
    size: int
    files_free: int
    read_only: bool


@dataclass(frozen=True, slots=True)
class FileFault:
    """A file that a service reads, and cannot use. what: its use, e.g. `the signing secret of shop/crm`."""

    what: str
    path: str
    problem: str
    about: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Certificate:
    """whose: for a person. until: seconds since the epoch. lanes: empty for the way to Kafka. path: of its file; None: a receiver
    showed it, or a service, which knows the file: place."""

    whose: str
    until: float
    lanes: tuple[str, ...]
    path: Path | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server of a destination, as it answered a connection without a request. problem: empty when it accepted one."""

    url: str
    lanes: tuple[str, ...]
    problem: str = ""
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Letters:
    """New dead letters of one kind that nobody has redriven or discarded. example: a position. newest_at: when the newest one was
    written, s."""

    topic: str
    pipe: str
    destination: str
    node: str
    reason: str
    detail: str
    count: int
    example: str
    newest_at: float


@dataclass(slots=True)
class BrokerFacts:
    """problem: why it cannot be used, for a person; empty when it can. missing: topics of the pipe file that it lacks.
    silent: the other brokers of the pipe file that cannot be used, each with the reason.

    marks: of the transforms that have begun or were reset, by pipe. lags, later: by group and topic, some seconds apart.
    newest: the highest arrival time of a stream's newest records, ms; newest_at: our clock when these were read, s.
    """

    url: str = ""
    problem: str = ""
    hint: str = ""
    missing: tuple[str, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    pauses: Mapping[str, Pause] = field(default_factory=dict)
    marks: Mapping[str, TransformMark] = field(default_factory=dict)
    lags: dict[tuple[str, str], dict[int, Lag]] = field(default_factory=dict)
    later: dict[tuple[str, str], dict[int, Lag]] = field(default_factory=dict)
    positions: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    positions_later: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    gaps: dict[tuple[str, TopicPartition], tuple[int, int]] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    newest_at: float = 0.0
    letters: tuple[Letters, ...] = ()
    damage: tuple[str, ...] = ()
    ends: dict[str, int] = field(default_factory=dict)
    is_log: bool = False


@dataclass(slots=True)
class ObserverFacts:
    """The answer to GET /v1/pipes. problem: why there is none, for a person.

    drifts: payload fields that have changed, each with its pipe and a text. groups: the autoscaler's last report about each one.
    """

    address: str = ""
    problem: str = ""
    pipes: tuple[Mapping[str, object], ...] = ()
    drifts: tuple[tuple[str, str], ...] = ()
    groups: tuple[GroupReport, ...] = ()
    catching_up: bool = False
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint of a pipe's transform in the data folder. made: seconds since the epoch; None: there is none.

    first_result: when the oldest stored result was stored, where the embedded log shows it. is_reset: an operator set an earlier
    checkpoint aside. has_identity: penstock.json is there; it is written before the mark that the transform has begun.
    """

    pipe: str
    path: Path
    made: float | None
    first_result: float | None = None
    is_reset: bool = False
    has_identity: bool = False


@dataclass(slots=True)
class Facts:
    """Everything that was found. now: seconds since the epoch. unknown: by collector, why it found nothing, for a person.

    state: of the fleet on this machine; None where the fleet is elsewhere, or was stopped in good order. mistakes: of the pipe
    file as it is now; the fleet may run on an earlier one.
    """

    now: float
    data: Path | None = None
    state: FleetState | None = None
    stopped: bool = False
    folder: str = ""
    supervisor: Instance | None = None
    started: float | None = None
    pipes: PipeFile | None = None
    pipes_path: Path | None = None
    mistakes: tuple[str, ...] = ()
    instances: list[Instance] = field(default_factory=list)
    disks: tuple[Disk, ...] = ()
    files: tuple[FileFault, ...] = ()
    changed: tuple[str, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    broker: BrokerFacts = field(default_factory=BrokerFacts)
    observer: ObserverFacts = field(default_factory=ObserverFacts)
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether the fleet was stopped, or its supervisor is dead, and the services with it."""
        return self.stopped or (self.supervisor is not None and self.supervisor.status in ("gone", "zombie"))

    def of(self, service: str) -> list[Instance]:
        return [one for one in self.instances if one.service == service]

    def series(self, metric: str, **labels: str) -> Iterator[tuple[Instance, dict[str, str], float, float]]:
        """(instance, labels, value, growth between the two readings) of each child of a metric with these labels."""
        for one, found, before, value in self.gauges(metric, **labels):
            yield one, found, value, value - (before or 0.0) if value >= (before or 0.0) else value

    def gauges(self, metric: str, **labels: str) -> Iterator[tuple[Instance, dict[str, str], float | None, float]]:
        """(instance, labels, value at the first reading, last value); None: the child was not there then.

        With one reading both are its value.
        """
        wanted = set(labels.items())
        for one in self.instances:
            last = one.second or one.first
            if last is None:
                continue
            before = one.first.values if one.first is not None and one.second is not None else last.values
            for (name, found), value in last.values.items():
                if name == metric and wanted <= found:
                    yield one, dict(found), before.get((name, found)), value

    def total(self, metric: str, of: Instance | None = None, /, **labels: str) -> float:
        """The sum of a metric over all instances, or of one."""
        return sum(value for one, _, value, _ in self.series(metric, **labels) if of is None or one is of)

    def growth(self, metric: str, of: Instance | None = None, /, **labels: str) -> float:
        """How much a counter grew between the two readings, over all instances, or of one."""
        return sum(grown for one, _, _, grown in self.series(metric, **labels) if of is None or one is of)

    def age_of(self, one: Instance) -> float | None:
        """Seconds since its start; None where neither the operating system nor its metrics say it."""
        if one.age is not None:
            return one.age
        starts = [at for other, _, at, _ in self.series("process_start_time_seconds") if other is one]
        return max(0.0, self.now - starts[0]) if starts else None

    def is_young(self, one: Instance, limit: float) -> bool:
        """Whether it was started less than `limit` seconds ago; not where its age is unknown."""
        age = self.age_of(one)
        return age is not None and age < limit

    def lane_of(self, group: str) -> str:
        """`pipe/destination` of a destination's group; the group itself for any other."""
        for name, pipe in (self.pipes.pipes if self.pipes is not None else {}).items():
            for destination in pipe.destinations:
                if delivery_group(name, destination.name) == group:
                    return lane_name(name, destination.name)
        return group

    def seconds(self) -> float:
        """The time between the two readings; 0 with one reading only."""
        gaps = [one.second.at - one.first.at for one in self.instances if one.first and one.second]
        return max(gaps, default=0.0)
