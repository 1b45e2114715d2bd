"""Takes a mend out of the code, so that the simulation proves itself by finding the fault.

A change is the text that mends, and the text without it; it is made while the module is imported, and never on disk.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Change:
    """In this file, `mended` stands exactly once; `broken` takes its place."""

    file: str
    mended: str
    broken: str

    @property
    def module(self) -> str:
        """Its name."""
        return self.file.removesuffix(".py").replace("/", ".")

    def apply(self, text: str) -> str:
        """Raises ValueError when the mend is not there."""
        if text.count(self.mended) != 1:
            raise ValueError(f"{self.file}: {text.count(self.mended)} times instead of once: {self.mended!r}")
        return text.replace(self.mended, self.broken)


@dataclass(frozen=True, slots=True)
class Patch:
    """One mend. fault: what is broken without it. quick: a test run has time to find it, and begins with this seed."""

    name: str
    fault: str
    changes: tuple[Change, ...]
    quick: int | None = None
    needs: frozenset[str] = frozenset()
    """Words that a history must have (`Choice.words`): no other one can notice, and is passed over."""


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        for change in self._changes:
            text = change.apply(text)
        return compile(text, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, patch: Patch) -> None:
        self._changes: dict[str, list[Change]] = {}
        for change in patch.changes:
            self._changes.setdefault(change.module, []).append(change)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        changes = self._changes.get(name)
        if changes is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, changes)
        return spec


def take_out(patch: Patch) -> None:
    """The mend is not there in what is imported from now on."""
    sys.meta_path.insert(0, _Finder(patch))
