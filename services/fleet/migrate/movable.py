"""Decides whether a stream may be moved, by the present pipe file."""

from collections.abc import Callable
from pathlib import Path

from services.core.broker.connect import is_kinesis
from services.core.broker.several.brokers import DEFAULT
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.fleet.problem import CommandFailed, unknown_name

_KINESIS_KEEPS_S = 365 * 86_400

LoadPipes = Callable[[str | None], PipeFile]
"""Loads the present pipe file, and checks it for a move to this broker (`check_movable`). Blocking. Raises BadConfiguration,
CommandFailed."""


def load_movable(path: Path, stream: str, url: str, to: str | None) -> PipeFile:
    """Do as `LoadPipes` does, with this file. The other arguments are those of `check_movable`."""
    pipes = load_pipes(path)
    check_movable(pipes, stream, to, url)
    return pipes


def check_movable(pipes: PipeFile, stream: str, to: str | None, url: str) -> None:
    """Raises CommandFailed when this stream cannot be moved at all, or not to that broker. url: of the fleet's own broker. to:
    None when the command only shows or ends a move. Then the kind of the stream does not matter."""
    if stream not in pipes.streams:
        raise unknown_name(f"the pipe file has no stream {stream}", stream, pipes.streams)
    if is_kinesis(url):
        raise CommandFailed(
            "the fleet's own broker is Kinesis: its processes cannot follow a move quickly enough there",
            "a pipe of another fleet, which reads the stream and sends its events to ingest there",
            status=2,
        )
    if not pipes.brokers:
        raise CommandFailed(
            "the pipe file names no other broker", "brokers: {NAME: URL} in the pipe file, and penstock up", status=2
        )
    if to is None:
        return
    names = [DEFAULT, *pipes.brokers]
    if to not in names:
        raise unknown_name(f"the pipe file has no broker {to}", to, names)
    if is_kinesis(pipes.brokers.get(to, "")) and pipes.streams[stream].retention > _KINESIS_KEEPS_S:
        raise CommandFailed(
            f"Kinesis keeps no event for longer than a year, and {stream} keeps them for longer",
            f"{stream}: {{retention: 365d}} in the pipe file, and penstock up",
            status=2,
        )
    if pipes.streams[stream].topic is not None:
        raise CommandFailed(
            f"{stream} is a topic of others, and only its owner can move it", "asking the owner", status=2
        )
    if pipes.streams[stream].compact:
        raise CommandFailed(
            f"{stream} is compacted: its offsets have gaps where events were removed, and a copy has none",
            "a pipe that copies the stream into a compacted one on the other broker",
            status=2,
        )
    readers = [name for name, pipe in pipes.pipes.items() if pipe.transform is not None and stream in pipe.sources]
    if readers:
        raise CommandFailed(
            f"the transform of {readers[0]} reads {stream}, and its position is in its checkpoint, which knows one broker",
            "a pipe without a transform that copies the stream into one on the other broker",
            status=2,
        )
