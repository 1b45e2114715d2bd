"""Everything about a pipe file that can be checked before anything starts."""

import os
from collections.abc import Callable
from pathlib import Path

from services.core.destination_check import check_destinations
from services.core.net_guard import NetPolicy, parse_endpoints, parse_networks
from services.core.pipes import PipeFile, read_pipes
from services.core.snapshot import Contents, read_contents
from services.core.yaml_source import BadConfiguration, Document, Problem
from services.fleet.problem import CommandFailed

_READINGS = 5


def check_pipe_file(path: Path, *, listen: str = "", allow_networks: str = "", secrets: bool = True) -> PipeFile:
    """The pipe file, or BadConfiguration with every mistake: shape, references, destinations, secrets, files it names.

    listen: our own ingest, which is no destination. secrets: look for signing secrets, too. Blocking.
    """
    try:
        allowed = parse_networks(allow_networks)
    except ValueError as error:
        raise BadConfiguration([Problem("--allow-networks", "", str(error))]) from None
    document, pipes, problems = read_pipes(path)
    policy = NetPolicy(allow=allowed, own=parse_endpoints(listen))
    problems += check_destinations(document, pipes, policy, os.environ if secrets else None)
    problems += _missing_files(document, pipes)
    if problems:
        raise BadConfiguration(problems)
    return pipes


def _missing_files(document: Document, pipes: PipeFile) -> list[Problem]:
    """Python transforms that name a file which is not there."""
    return [
        document.problem(("pipes", name, "transform", "python"), f"there is no file {file}")
        for name, file in _python_files(document.path, pipes).items()
        if not file.is_file()
    ]


def _python_files(path: Path, pipes: PipeFile) -> dict[str, Path]:
    """The files beside the pipe file that transforms run, by pipe."""
    modules = {
        name: (pipe.transform.python or "").rpartition(":")[0] for name, pipe in pipes.pipes.items() if pipe.transform
    }
    return {name: path.parent / module for name, module in modules.items() if module.endswith(".py")}


def read_checked(path: Path, config: str | None, check: Callable[[], PipeFile]) -> tuple[PipeFile, Contents]:
    """What `check` gives, and the content of every file that a service reads of it, such that the one is of the other.

    Blocking. Raises CommandFailed while somebody is writing them, and what `check` raises.
    """
    settings = [Path(config)] if config else []
    for _ in range(_READINGS):
        pipes = check()
        try:
            contents = read_contents([path, *settings, *_python_files(path, pipes).values()])
        except OSError as error:
            raise CommandFailed(f"{error.filename} cannot be read: {error.strerror}", status=2) from error
        if check() == pipes and contents == read_contents(map(Path, contents)):
            return pipes, contents
    raise CommandFailed(f"{path} changed again and again while it was read", "again, when nobody writes to it")
