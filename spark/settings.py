"""Settings of the transform service."""

from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from services.core.settings import Settings
from services.core.units import Duration, Size


class TransformSettings(Settings):
    """The transform service: runs the Spark transforms of the pipes."""

    section: ClassVar[str] = "transform"

    data: Path = Field(Path("/var/lib/penstock"), description="Data folder; checkpoints lie in it.")
    checkpoints: str = Field(
        "",
        description="Folder or object-store URI (s3a://…) of the checkpoints; empty: checkpoints/ in the data folder.",
    )
    only: str = Field("", description="Pipes to run, names joined by commas; empty: every pipe with a transform.")
    master: str = Field("local[2]", description="Spark master; local[N] runs N tasks at once.")
    batch_timeout: Duration = Field(
        300.0,
        description="How long a batch may take, e.g. 5m: then the process ends, to be started again. Of a batch that is done in "
        "parts, each may take a tenth of it.",
    )
    memory: Size = Field(1 << 30, description="Heap of Spark's driver, e.g. 1GiB.")

    @classmethod
    def program(cls) -> str:
        """How the service is started, for its help."""
        return "python -m spark"

    def checkpoint_root(self) -> str:
        """An absolute path, or a URI with a scheme."""
        if urlsplit(self.checkpoints).scheme:
            return self.checkpoints.rstrip("/")
        return str(Path(self.checkpoints).absolute() if self.checkpoints else self.data.absolute() / "checkpoints")

    def chosen(self) -> frozenset[str]:
        """The names in `only`."""
        return frozenset(name.strip() for name in self.only.split(",") if name.strip())
