"""Making durable what Spark noted in a local checkpoint folder: Spark itself syncs nothing.

Imported by the process that commits to the log: nothing but files.
"""

import contextlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_batch(checkpoint: Path, batch: int) -> None:
    """Sync what is noted so far about this batch: what it reads, the state that it leaves, and that the one before is done.

    To be called before anything of the batch becomes visible elsewhere: after a power cut the output would else hold a
    batch that the checkpoint does not know, and numbers would be given twice.
    """
    notes = [f"offsets/{batch}", f"offsets/.{batch}.crc", f"commits/{batch - 1}", f"commits/.{batch - 1}.crc"]
    patterns = (*notes, f"state/**/{batch + 1}.*", f"state/**/.{batch + 1}.*")
    files = [path for pattern in patterns for path in checkpoint.glob(pattern)]
    for path in (*files, *{path.parent for path in files}):
        with contextlib.suppress(FileNotFoundError):  # Spark cleans up meanwhile
            sync(path)
