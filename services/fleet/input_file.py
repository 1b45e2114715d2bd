"""A file or pipe to read from a thread, which another thread can make let go of a pipe that gives nothing."""

import io
import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

STDIN = 0


class InputFile(io.FileIO):
    """Raw bytes of a file, or of standard input, which stays open afterwards. Raises OSError when it cannot be opened."""

    def __init__(self, file: Path | int) -> None:
        super().__init__(file, closefd=not isinstance(file, int))
        self._told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)

    def readinto(self, buffer: "Buffer", /) -> int | None:
        """Blocks until there is something, the end (0), or `stop`, from which on it is at its end."""
        ready, _, _ = select.select([self.fileno(), self._told], [], [])
        return 0 if self._told in ready else super().readinto(buffer)

    def stop(self) -> None:
        """End what reads now and later."""
        os.write(self._tell, b".")

    def close(self) -> None:
        """Close it, once."""
        if not self.closed:
            os.close(self._told)
            os.close(self._tell)
        super().close()
