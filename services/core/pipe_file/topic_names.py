"""The names of topics, groups and lanes that follow from the pipe file."""

from collections.abc import Callable

from services.core.pipe_file.pipes import Pipe, PipeFile, Removed
from services.core.pipe_file.references import RESERVED, former_lanes


def output_topic(pipe: str) -> str:
    """The topic of the transform's output."""
    return f"{pipe}.out"


def dead_letter_topic(pipe: str) -> str:
    return f"{pipe}.dead"


def retry_topic(pipe: str) -> str:
    """The topic to which the global retrier writes events that are due again. The pipe's lanes in expel read it."""
    return f"{pipe}.retry"


def parked_topic(pipe: str) -> str:
    """The topic in which events of paused destinations wait. The pipe's lanes in expel write and read it."""
    return f"{pipe}.parked"


def event_topics(pipes: PipeFile) -> list[str]:
    """The topics of events: the streams and the outputs of transforms."""
    outputs = [output_topic(name) for name, pipe in pipes.pipes.items() if pipe.transform is not None]
    return [*pipes.streams, *outputs]


RETRY_IN = f"{RESERVED}.retry-in"
"""The topic by which expel hands events over to the global retrier (`retry_state`)."""
RETRIER_DEAD = f"{RESERVED}.dead"
"""The global retrier's dead letters: records that are no retry records, or whose pipe is gone."""
AUDIT = f"{RESERVED}.audit"
"""Operators' actions on dead letters and on groups (`audit`)."""
CONTROL = f"{RESERVED}.control"
"""Pauses and resumes of destinations and transforms (`pauses`); freezes of groups of instances (`freezes`); the bookmark of the
waiting events (`waiting`)."""
RETRIER_GROUP = f"{RESERVED}.retrier"
"""The consumer group of the global retriers."""
DELAYS_S = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""The waits of the delay topics, ascending."""


def delay_topic(seconds: int) -> str:
    """The topic in which an event waits so long. seconds: one of DELAYS_S."""
    return f"{RESERVED}.delay-{seconds}s"


RETRIER_TOPICS = (RETRY_IN, *map(delay_topic, DELAYS_S))
"""The topics that the group of the global retriers reads."""


def is_of_retrier(topic: str) -> bool:
    """Whether events in this topic wait with the global retrier, or were written by it."""
    return topic == RETRY_IN or topic.startswith(f"{RESERVED}.delay-") or topic.endswith(".retry")


def lane_name(pipe: str, destination: str) -> str:
    """The name of a lane in `removed`, in the control topic and in the observer's API."""
    return f"{pipe}/{destination}"


def lanes_of(pipes: PipeFile) -> frozenset[str]:
    """The lanes of all destinations of the file."""
    return frozenset(
        lane_name(name, destination.name) for name, pipe in pipes.pipes.items() for destination in pipe.destinations
    )


def renames_of(pipes: PipeFile) -> dict[str, str]:
    """The lane of each former name (`renamed_from`). Of several former names of one lane the latest is first."""
    found: dict[str, str] = {}
    for name, pipe in pipes.pipes.items():
        for one in pipe.destinations:
            for former in former_lanes(name, pipe.renamed_from, one.name, one.renamed_from):
                found.setdefault(former, lane_name(name, one.name))
    return found


def removed_lanes(pipes: PipeFile) -> dict[str, Removed]:
    """The decision about each lane that the file no longer has and names: those of `removed`, and former names."""
    renamed = {old: Removed(deliver_to=new) for old, new in renames_of(pipes).items()}
    return renamed | {lane: choice for lane, choice in pipes.removed.items() if "/" in lane}


def removed_pipes(pipes: PipeFile) -> dict[str, Removed]:
    """The decision about each whole pipe in `removed`. It counts for lanes of that pipe without an entry of their own."""
    return {name: choice for name, choice in pipes.removed.items() if "/" not in name}


def claims_of(pipes: PipeFile) -> Callable[[str], bool]:
    """Answers whether the file has a lane, or says what becomes of its events."""
    lanes, of_pipes = lanes_of(pipes) | removed_lanes(pipes).keys(), removed_pipes(pipes).keys()
    return lambda lane: lane in lanes or lane.partition("/")[0] in of_pipes


def delivery_topics(name: str, pipe: Pipe) -> list[str]:
    """The topics that expel reads for this pipe: the transform's output, or the sources."""
    return [output_topic(name)] if pipe.transform is not None else list(pipe.sources)


def delivery_group(pipe: str, destination: str) -> str:
    """The consumer group of one destination."""
    return f"{pipe}.{destination}"
