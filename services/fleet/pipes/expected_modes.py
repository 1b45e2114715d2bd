"""The mode of each transform, in the words of `penstock check` and `penstock status`.

`check` tells the mode before the start, as far as the pipe file and the settings show it: the service decides with Spark.
`spark.jobs.modes` has the whole rule. What only Spark's plan or the checkpoint shows is missing there.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.transform import Transform
from services.fleet.dead.view import plain

_REASONS = {
    "asked": "mode is set",
    "broker": "only Kafka can be read in real-time mode",
    "python": "Spark runs no Python functions in real-time mode",
    "state": "it works on several events",
    "deduplication": "deduplicate_within needs micro-batches",
    "event": "it returns all fields of event",
    "plan": "it joins a table, or reads a source more than once",
    "new_events": "it makes new events",
    "interval": "interval is set, which only micro-batches have",
    "batch_timeout": "--batch-timeout is short",
    "slots": "it needs more task slots (--master)",
    "cluster": "the number of task slots of a cluster changes",
    "checkpoint": "its checkpoint cannot change the mode",
    "partitions": "partitions were added; restart the service",
    "refused": "Spark refused it; the log has its words",
}
"""Against real-time mode, by the word in `spark.jobs.modes.Reason`; `asked` is only known here. docs/transforms.md has them with
their remedies."""
_REMEDIES = {
    "broker": "a broker kafka://HOST:9092, where seconds matter",
    "python": "write the transform in SQL",
    "state": "a pipe of its own for the part that treats each event by itself",
    "deduplication": "leave it out, where receivers recognise repeated events by their id",
    "plan": "a pipe of its own for what works without that",
    "interval": "leave it out",
    "cluster": "mode: real-time, with enough executors",
}
"""What would allow real-time mode, for each reason that shows before the start."""


def describe_micro_batches(whys: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """A line for each reason against real-time mode, with its pipes. whys: pipes, each with its reason's word.

    Yields the reason's word and the line.
    """
    pipes: dict[str, list[str]] = {}
    for pipe, why in whys:
        pipes.setdefault(why, []).append(pipe)
    for why, names in pipes.items():
        reason = _REASONS.get(why, plain(why).replace("_", " "))
        yield why, f"micro-batch, not real-time, in {plain(', '.join(names), 200)}: {reason}"


class ExpectedMode(NamedTuple):
    """mode: `real-time` where Spark's plan has no reason against it, and on Kafka alone. why: the code of the reason, as in the
    metric `penstock_transform_mode`; `asked`: the pipe file sets the mode; empty: there is no reason against real-time mode.
    """

    mode: Literal["micro-batch", "real-time"]
    why: str


def describe_modes(modes: Mapping[str, ExpectedMode], *, is_known: bool) -> Iterator[str]:
    """Lines about the transforms, by pipe. is_known: whether the broker is. Without it, it may be the embedded log, which allows
    no real-time mode anyhow: no line has a way to it."""
    slow = ((pipe, mode.why) for pipe, mode in modes.items() if mode.mode == "micro-batch")
    for why, line in describe_micro_batches(slow):
        yield f"{line}. For real-time mode: {_REMEDIES[why]}" if why in _REMEDIES and is_known else line
    asked = [pipe for pipe, mode in modes.items() if mode.mode == "real-time" and mode.why]
    if asked:
        yield f"real-time in {', '.join(asked)}, or no start: mode is set. With mode: auto it takes what Spark allows"
    fast = [pipe for pipe, mode in modes.items() if mode.mode == "real-time" and not mode.why]
    if fast and is_known:
        yield f"perhaps real-time in {', '.join(fast)}: Spark decides when the transform starts"
    elif fast:
        _, line = next(describe_micro_batches((pipe, "broker") for pipe in fast))
        yield f"on the embedded log: {line}"


def expected_modes(pipes: PipeFile, broker: str | None, master: str) -> dict[str, ExpectedMode]:
    """By pipe with a transform. broker: its URL; None: it is not known, and counts as Kafka. master: of Spark."""
    is_kafka = broker is None or urlsplit(broker).scheme == "kafka"
    transforms = {name: pipe.transform for name, pipe in pipes.pipes.items()}
    return {name: _expect(one, is_kafka, master) for name, one in transforms.items() if one is not None}


def _expect(transform: Transform, is_kafka: bool, master: str) -> ExpectedMode:
    if transform.mode != "auto":
        return ExpectedMode(transform.mode, "asked")
    against = {
        "broker": not is_kafka,
        "python": transform.python is not None,
        "deduplication": transform.deduplicate_within is not None,
        "state": transform.watermark is not None,
        "interval": "interval" in transform.model_fields_set,
        "plan": bool(transform.tables),
        "cluster": is_cluster(master),
    }
    why = next((code for code, is_true in against.items() if is_true), "")
    return ExpectedMode("micro-batch" if why else "real-time", why)


def is_cluster(master: str) -> bool:
    """Whether the tasks of this Spark master run on other hosts. The transform service knows all the forms of a master."""
    return master.startswith(("spark://", "k8s://")) or master == "yarn"
