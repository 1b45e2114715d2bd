"""Copies the checkpoints of transforms together with the log that they belong to.

A checkpoint that is newer than the copy of its output would lose the batches between them; one that is older is refused, because
the next batches would get the numbers of stored ones (`check_not_older` of the transform). So `read_checkpoints` runs within the
locks of the log's cut: nothing is stored then, and the numbers of planned and finished batches are those of a crash at this
moment. The files are copied afterwards, up to these batches; files of a batch never change once the next one is planned.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.core.folders import make_folder
from services.fleet.backup.manifest import CheckpointCopy, write_file
from services.fleet.problem import CommandFailed

_REJECTS = "rejects"
"""The second query of a transform that is part of the streaming plan: its checkpoint is in this folder."""
_OF_PROCESS = ("penstock.lock", "claims")
"""Who uses the checkpoint: nobody uses the copy."""
_SAFE_BATCHES = 50
"""Spark keeps the files of its last 100 batches."""


@dataclass(frozen=True, slots=True)
class QueryState:
    """The newest batches of one query: planned (`offsets/`) and done (`commits/`)."""

    planned: int | None
    done: int | None


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint at one moment. notes: the content of Penstock's own files. queries: by their folder below."""

    folder: Path
    notes: dict[str, bytes]
    queries: dict[str, QueryState]

    @property
    def pipe(self) -> str:
        return self.folder.name

    @property
    def entry(self) -> CheckpointCopy:
        """For the manifest."""
        return CheckpointCopy(self.pipe, self.queries[""].planned, self.queries[""].done)


def read_checkpoints(root: Path) -> list[CheckpointState]:
    """The checkpoints in this folder, without those that `penstock group reset` put aside. Blocking. Raises OSError."""
    folders = [each for each in sorted(root.iterdir()) if _is_current(each)] if root.is_dir() else []
    return [_read_checkpoint(folder) for folder in folders]


def _is_current(folder: Path) -> bool:
    return folder.is_dir() and "." not in folder.name and (folder / "penstock.json").exists()


def _read_checkpoint(folder: Path) -> CheckpointState:
    """Notes first: one that is older than its batches is made again, one that is newer would leave events out."""
    notes = {path.name: path.read_bytes() for path in sorted(folder.glob("*.json"))}
    names = ["", _REJECTS] if (folder / _REJECTS).is_dir() else [""]
    queries = {}
    for name in names:
        done = _newest(folder / name / "commits")
        queries[name] = QueryState(_newest(folder / name / "offsets"), done)
    return CheckpointState(folder, notes, queries)


def _newest(folder: Path) -> int | None:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def copy_checkpoint(state: CheckpointState, target: Path) -> None:
    """Copy the files that belong to the state. Blocking. Raises CommandFailed when the transform went on too far, OSError."""
    make_folder(target, mode=0o700)
    for path in _files_of(state):
        to = target / path
        make_folder(to.parent, mode=0o700)
        try:
            shutil.copyfile(state.folder / path, to)
        except FileNotFoundError:
            to.unlink(missing_ok=True)  # Spark removes files of batches that are long done
    for name, content in state.notes.items():
        write_file(target / name, content)
    for name, query in state.queries.items():
        newest = _newest(state.folder / name / "commits") or 0
        if newest - (query.done or 0) > _SAFE_BATCHES:
            raise CommandFailed(
                f"the transform of {state.pipe} finished {newest - (query.done or 0)} batches while it was copied",
                "again; a faster disk for the backup; or penstock pause, which stops the transform, before it",
            )
        if query.planned is not None and not (target / name / "offsets" / str(query.planned)).exists():
            raise CommandFailed(
                f"batch {query.planned} of the checkpoint of {state.pipe} was removed meanwhile", "again"
            )


def _files_of(state: CheckpointState) -> Iterator[Path]:
    """Relative to the checkpoint's folder."""
    for path in sorted(state.folder.rglob("*")):
        relative = path.relative_to(state.folder)
        if not path.is_file() or relative.parts[0] in _OF_PROCESS or ".tmp" in path.name or path.name.endswith(".new"):
            continue
        if relative.name in state.notes and len(relative.parts) == 1:
            continue
        in_rejects = relative.parts[0] == _REJECTS
        query = state.queries.get(_REJECTS if in_rejects else "")
        if query is not None and _belongs(relative.parts[in_rejects:], query):
            yield relative


def _belongs(parts: tuple[str, ...], query: QueryState) -> bool:
    """Whether a file is of a batch up to the state. Version v of the state is the result of batch v - 1."""
    digits = parts[-1].lstrip(".").partition(".")[0].partition("_")[0]
    if len(parts) < 2 or not digits.isdigit():
        return True
    last = {"offsets": query.planned, "commits": query.done, "state": None if query.done is None else query.done + 1}
    if parts[0] not in last:
        return True
    newest = last[parts[0]]
    return newest is not None and int(digits) <= newest


def renew_incarnations(folder: Path, renewed: dict[str, str]) -> None:
    """Replace the incarnations of the restored log's topics in a restored checkpoint. Blocking. Raises OSError."""
    pairs = [(old.encode(), new.encode()) for old, new in renewed.items()]
    for path in [*folder.glob("*.json"), *folder.glob("**/offsets/[0-9]*")]:
        before = after = path.read_bytes()
        for old, new in pairs:
            after = after.replace(old, new)
        if after != before:
            write_file(path, after)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Spark's sum of the former content
