"""Settings of the transform service, and the pipes that it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from services.core.pipes import PipeFile, read_pipes
from services.core.settings import Settings
from services.core.units import Duration, Size
from services.core.yaml_source import BadConfiguration, Document, Problem

_LEAST_MEMORY = 450 << 20
"""Spark itself refuses to start with less."""


def _enough(memory: int) -> int:
    if memory < _LEAST_MEMORY:
        raise ValueError("Spark needs at least 450MiB. Try: 1GiB")
    return memory


class TransformSettings(Settings):
    """The transform service: runs the Spark transforms of the pipes."""

    section: ClassVar[str] = "transform"

    data: Path = Field(
        Path("/var/lib/penstock"), description="Data folder. The checkpoints and Spark's temporary files are in it."
    )
    checkpoints: str = Field(
        "",
        description="Folder or object-store URI (s3a://…) of the checkpoints; empty: checkpoints/ in the data folder.",
    )
    only: str = Field("", description="Pipes to run, names joined by commas; empty: every pipe with a transform.")
    master: str = Field("local[2]", description="Spark master; local[N] runs N tasks at once.")
    batch_timeout: Duration = Field(
        300.0,
        description="Time limit of a batch, e.g. 5m; a tenth of it for each part of a batch that is done in parts. Beyond the "
        "limit the process ends, and its supervisor starts it again.",
    )
    memory: Annotated[Size, AfterValidator(_enough)] = Field(
        1 << 30, description="Heap of Spark's driver, at least 450MiB, e.g. 1GiB."
    )

    @classmethod
    def program(cls) -> str:
        return "python -m spark"

    def checkpoint_root(self) -> str:
        """An absolute path, or a URI with a scheme."""
        if urlsplit(self.checkpoints).scheme:
            return self.checkpoints.rstrip("/")
        return str(Path(self.checkpoints).absolute() if self.checkpoints else self.data.absolute() / "checkpoints")

    def selected(self) -> frozenset[str]:
        """The names in `only`."""
        return frozenset(name.strip() for name in self.only.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class SelectedPipes:
    """A pipe file and the names of the pipes to run; each of these has a transform. document: for messages with lines."""

    document: Document
    file: PipeFile
    names: list[str]


def load_pipes(settings: TransformSettings) -> SelectedPipes:
    """Blocking. Raises BadConfiguration with every mistake."""
    document, file, problems = read_pipes(settings.pipes)
    known = sorted(name for name, pipe in file.pipes.items() if pipe.transform is not None)
    selected = settings.selected() or frozenset(known)
    remedy = f"Try: {', '.join(known) or 'none there'}"
    for name in sorted(selected - set(known)):
        problems.append(Problem("only", "", f"{name!r} is no pipe with a transform in {document.path}. {remedy}"))
    if problems:
        raise BadConfiguration(problems)
    return SelectedPipes(document, file, sorted(selected))
