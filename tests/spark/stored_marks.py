"""The marks of the transforms that have begun, in memory."""

from services.core.control.transform_marks import TransformMark
from services.core.pipe_file.state_plan import StatePlan


class StoredMarks:
    """As `spark.marks.Marks`. written: the pipe and the checkpoint of each mark that was written."""

    def __init__(self, **marks: TransformMark) -> None:
        self.newest = marks
        self.written: list[tuple[str, str]] = []

    def read(self, pipe: str) -> TransformMark | None:
        return self.newest.get(pipe)

    def write(self, pipe: str, checkpoint: str, plan: StatePlan | None) -> None:
        self.written.append((pipe, checkpoint))
        self.newest[pipe] = TransformMark("begun", checkpoint, "transform", 1_700_000_000_000, plan=plan)
