"""A transform as code: SQL over views, or a Python function of frames. Stream and batch run the same."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Protocol

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from services.core.pipes import Transform
from services.core.snapshot import source_of
from spark.java import check_is_query
from spark.transforms.output import BadTransform


class Definition(Protocol):
    """source: its text. A transform with another text may have other results."""

    source: str

    def check(self, session: SparkSession) -> None:
        """Raise on a mistake that shows before anything is applied."""

    def apply(self, session: SparkSession, views: Mapping[str, DataFrame]) -> DataFrame:
        """The result over these source frames, by stream name in the pipe's order. Lazy: nothing runs yet."""


class SqlDefinition:
    """A SELECT in which each source stream is a view of its name."""

    def __init__(self, sql: str) -> None:
        self._sql = self.source = sql

    def check(self, session: SparkSession) -> None:
        """Raises ParseException unless it is a query."""
        check_is_query(session, self._sql)

    def apply(self, session: SparkSession, views: Mapping[str, DataFrame]) -> DataFrame:
        """Replaces the views in this session, which must be the frames' own."""
        for name, frame in views.items():
            frame.createOrReplaceTempView(f"`{name}`")
        return session.sql(self._sql)


class PythonDefinition:
    """A function that gets one frame per source stream and returns one."""

    def __init__(self, function: Callable[..., DataFrame], source: str) -> None:
        self._function, self.source = function, source

    def check(self, session: SparkSession) -> None:
        """Only the call shows mistakes."""

    def apply(self, session: SparkSession, views: Mapping[str, DataFrame]) -> DataFrame:
        """Calls the function. Raises BadTransform when it returns something else."""
        result = self._function(*views.values())
        if not isinstance(result, DataFrame):
            raise BadTransform(f"returned {type(result).__name__}, not a DataFrame")
        return result


def load_definition(transform: Transform, folder: Path) -> Definition:
    """The definition in the pipe file, which is in `folder`. Runs the Python module. Raises BadTransform."""
    if transform.sql is not None:
        return SqlDefinition(transform.sql)
    assert transform.python is not None
    place, _, name = transform.python.rpartition(":")
    if not place or not name:
        raise BadTransform(f"{transform.python!r} names no function. Try: file.py:function or package.module:function")
    try:
        module = _load_file(folder / place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise BadTransform(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadTransform(f"{place} has no function {name!r}")
    loader = getattr(module, "__loader__", None)
    source = loader.get_source(module.__name__) if isinstance(loader, SourceFileLoader) else None
    return PythonDefinition(function, f"{transform.python}\n{source}")


class _SnapshotLoader(SourceFileLoader):
    """Loads the module of this path from the configuration's snapshot (`source_of`)."""

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Raises, so that no bytecode is cached: it would belong to the present file, not to the snapshot."""
        raise OSError

    def get_data(self, path: str) -> bytes:
        return source_of(Path(path)).read_bytes()


def _load_file(path: Path) -> ModuleType:
    module_name = f"penstock_transform_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path, loader=_SnapshotLoader(module_name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # workers cannot import a file that lies beside the pipe file
    return module
