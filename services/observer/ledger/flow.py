"""The pipes as the ledger sees them: which steps events pass, and which destinations feed which streams."""

from typing import NamedTuple

import msgspec

from services.core.ledger.report import Node
from services.core.pipe_file.pipes import PipeFile, is_retried
from services.core.pipe_file.topic_names import renames_of


class Step(NamedTuple):
    """One node of one pipe. pipe: for ingest the stream. destination: only for expel and the retrier."""

    node: Node
    pipe: str
    destination: str | None = None

    @property
    def label(self) -> str:
        """For a person who knows the pipe."""
        return self.node if self.destination is None else f"{self.node} to {self.destination}"

    @property
    def full_label(self) -> str:
        """With the stream of an ingest."""
        return f"ingest of {self.pipe}" if self.node == "ingest" else self.label


RETRIER = Step("retrier", "")
"""The retrier as a whole: it reports for all pipes at once how far behind it is."""


class PipeFlow(msgspec.Struct, frozen=True):
    """sources: streams. destinations: the stream that each feeds, None for a webhook.

    retried: the destinations that use the global retrier. late: those that begin at the newest event (`start: latest`).
    """

    sources: tuple[str, ...]
    transforms: bool
    destinations: dict[str, str | None]
    retried: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()


class Flow(msgspec.Struct, frozen=True):
    """All pipes by name. Without loops, as a pipe file is. renames: of each former (pipe, destination) the present one.

    others: the streams whose topics are others'. Their events are accepted by their first readers.
    """

    pipes: dict[str, PipeFlow]
    renames: dict[tuple[str, str | None], tuple[str, str]] = {}
    others: frozenset[str] = frozenset()

    def current(self, node: Node, pipe: str, destination: str | None) -> Step:
        """The step under its present name: what was reported under a former name counts for it."""
        if destination is None:  # the pipe of an ingest is a stream, and a pipe with a transform keeps its name
            return Step(node, pipe)
        return Step(node, *self.renames.get((pipe, destination), (self.current_pipe(pipe), destination)))

    def current_pipe(self, pipe: str) -> str:
        """The pipe's present name, also where it no longer has the destination of which it is the former name."""
        if pipe in self.pipes:
            return pipe
        return next((new for (old, _), (new, _) in self.renames.items() if old == pipe), pipe)

    def steps(self, pipe: str) -> list[Step]:
        """In the order in which events pass them; without the retrier's, and without an ingest where there is none."""
        flow = self.pipes[pipe]
        return [
            *(Step("ingest", source) for source in flow.sources if source not in self.others),
            *([Step("transform", pipe)] if flow.transforms else []),
            *(Step("expel", pipe, destination) for destination in flow.destinations),
        ]

    def knows(self, step: Step) -> bool:
        """Whether the step belongs to a pipe, and its stream or destination exists."""
        if step.node == "ingest":
            return any(step.pipe in pipe.sources for pipe in self.pipes.values())
        if step == RETRIER:
            return True
        pipe = self.pipes.get(step.pipe)
        return pipe is not None and (step.destination is None or step.destination in pipe.destinations)

    def feeders(self, stream: str) -> list[Step]:
        """The destinations that write into this stream."""
        return [
            Step("expel", name, destination)
            for name, pipe in self.pipes.items()
            for destination, target in pipe.destinations.items()
            if target == stream
        ]


def read_flow(file: PipeFile) -> Flow:
    return Flow(
        {
            name: PipeFlow(
                tuple(pipe.sources),
                pipe.transform is not None,
                {destination.name: destination.stream for destination in pipe.destinations},
                frozenset(destination.name for destination in pipe.destinations if is_retried(destination)),
                frozenset(destination.name for destination in pipe.destinations if destination.start == "latest"),
            )
            for name, pipe in file.pipes.items()
        },
        {_split(old): _split(new) for old, new in renames_of(file).items()},
        frozenset(name for name, stream in file.streams.items() if stream.topic is not None),
    )


def _split(lane: str) -> tuple[str, str]:
    pipe, _, destination = lane.partition("/")
    return pipe, destination
