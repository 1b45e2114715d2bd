"""The pipes that this process runs."""

from dataclasses import dataclass

from services.core.pipes import PipeFile, read_pipes
from services.core.yaml_source import BadConfiguration, Document, Problem
from spark.settings import TransformSettings


@dataclass(frozen=True, slots=True)
class Chosen:
    """A pipe file and the names of its pipes to run, each of which has a transform. document: for messages with lines."""

    document: Document
    file: PipeFile
    names: list[str]


def read_pipe_file(settings: TransformSettings) -> Chosen:
    """Read and validate. Blocking. Raises BadConfiguration with every mistake."""
    document, file, problems = read_pipes(settings.pipes)
    known = sorted(name for name, pipe in file.pipes.items() if pipe.transform is not None)
    wanted = settings.chosen() or frozenset(known)
    problems += [
        Problem(
            "only",
            "",
            f"{name!r} is no pipe with a transform in {document.path}. Try: {', '.join(known) or 'none there'}",
        )
        for name in sorted(wanted - set(known))
    ]
    if problems:
        raise BadConfiguration(problems)
    return Chosen(document, file, sorted(wanted))
