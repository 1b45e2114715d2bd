"""The mode in which each transform will run, as far as the pipe file and the settings show it: the service decides with Spark.

`spark.jobs.modes` has the whole rule. What only Spark's plan or the checkpoint shows is missing here.
"""

from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from services.core.pipe_transform import Transform
from services.core.pipes import PipeFile

_ASKED = "mode is set"
_REASONS = {
    "asked": (_ASKED, ""),
    "broker": ("only Kafka can be read in real-time mode", "a broker kafka://HOST:9092, where seconds matter"),
    "python": ("Spark runs no Python functions in real-time mode", "write the transform in SQL"),
    "deduplication": (
        "deduplicate_within needs micro-batches",
        "leave it out, where receivers recognise repeated events by their id",
    ),
    "state": ("it works on several events", "a pipe of its own for the part that treats each event by itself"),
    "interval": ("interval is set, which only micro-batches have", "leave it out"),
    "plan": ("it reads tables", "a pipe of its own for what works without them"),
    "cluster": ("the number of task slots of a cluster changes", "mode: real-time, with enough executors"),
}
"""The reason for micro-batches, and what would allow real-time mode."""


class ExpectedMode(NamedTuple):
    """mode: `real-time` where Spark's plan has no reason against it, and on Kafka alone. why: the code of the reason, as in the
    metric `penstock_transform_mode`; `asked`: the pipe file sets the mode; empty: there is no reason against real-time mode.
    """

    mode: Literal["micro-batch", "real-time"]
    why: str

    def describe(self, *, is_known: bool) -> str:
        """The end of a sentence about the transform. is_known: whether the broker is. Without it, it may be the embedded log,
        which allows no real-time mode anyhow."""
        if self.mode == "micro-batch":
            reason, remedy = _REASONS[self.why]
            return f"runs in micro-batches: {reason}{f'. Try: {remedy}' if remedy and is_known else ''}"
        if self.why == "asked":
            return (
                f"runs in real-time mode, or does not start: {_ASKED}. Try: mode: auto, which takes what Spark allows"
            )
        if not is_known:
            on_kafka = "on Kafka it may run in real-time mode, unless its SQL works on several events"
            return f"runs in micro-batches on the embedded log; {on_kafka}"
        return "may run in real-time mode: Spark decides when it starts"


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
