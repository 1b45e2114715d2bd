"""A transform that fails on every event of a slow stream: too few in one batch to tell, many in a row."""

from spark.checkpoint import Checkpoint
from spark.jobs.culprits import TransformBroken

ALL_FAILED = 20
"""So many poisoned events in a row, with none between them that passed, mean that the transform is broken."""
STREAK_FILE = "failed_in_row.json"


class Streak:
    """Poisoned events since the last one that passed. Kept beside the checkpoint: a restart does not begin to count again."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._length = checkpoint.read_note(STREAK_FILE, int) or 0

    def extend(self, failed: int, passed: int, example: str) -> None:
        """Some events of a batch failed; called before they are put aside. Raises TransformBroken: then none shall be."""
        length = 0 if passed else self._length + failed
        if length >= ALL_FAILED:
            raise TransformBroken(f"it failed on the last {length} events, all there were, e.g.: {example}")
        self._note(length)

    def end(self) -> None:
        """An event passed."""
        self._note(0)

    def _note(self, length: int) -> None:
        if length != self._length:
            self._checkpoint.write_note(STREAK_FILE, length)
            self._length = length
