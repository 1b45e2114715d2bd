"""Everything about a pipe file that can be checked before anything starts."""

import os
from pathlib import Path

from services.core.destination_check import check_destinations
from services.core.net_guard import NetPolicy, parse_endpoints, parse_networks
from services.core.pipes import PipeFile, read_pipes
from services.core.yaml_source import BadConfiguration, Document, Problem


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
    problems = []
    for name, pipe in pipes.pipes.items():
        module = (pipe.transform.python or "").rpartition(":")[0] if pipe.transform else ""
        if module.endswith(".py") and not (document.path.parent / module).is_file():
            key = ("pipes", name, "transform", "python")
            problems.append(document.problem(key, f"there is no file {document.path.parent / module}"))
    return problems
