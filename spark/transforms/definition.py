"""A transform as code: SQL over views, or a Python function of frames. Stream and batch run the same."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from services.core.pipe_file.snapshot import source_of
from services.core.pipe_file.transform import Transform
from spark.java import check_is_query
from spark.transforms.output import BadTransform


class Definition(NamedTuple):
    """source: the text. A transform with another text may have other results.

    apply: the result over the source frames, by stream name in the pipe's order; the session must be the frames' own. Lazy:
    nothing runs yet. code: the text of a Python file beside the pipe file.
    """

    source: str
    apply: Callable[[SparkSession, Mapping[str, DataFrame]], DataFrame]
    code: str = ""


def load_definition(session: SparkSession, transform: Transform, folder: Path) -> Definition:
    """The definition in the pipe file, which is in `folder`. Runs the Python module. Raises BadTransform, ParseException."""
    if transform.sql is not None:
        check_is_query(session, transform.sql)
        return Definition(transform.sql, partial(_apply_sql, transform.sql))
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
    code = (source or "") if place.endswith(".py") else ""
    return Definition(f"{transform.python}\n{source}", partial(_apply_function, function), code)


def _apply_sql(sql: str, session: SparkSession, views: Mapping[str, DataFrame]) -> DataFrame:
    """A SELECT in which each source stream is a view of its name. Replaces the session's views."""
    for name, frame in views.items():
        frame.createOrReplaceTempView(f"`{name}`")
    return session.sql(sql)


def _apply_function(
    function: Callable[..., object], _session: SparkSession, views: Mapping[str, DataFrame]
) -> DataFrame:
    """A function that gets one frame per source stream. Raises BadTransform when it returns no frame."""
    result = function(*views.values())
    if not isinstance(result, DataFrame):
        raise BadTransform(f"returned {type(result).__name__}, not a DataFrame")
    return result


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
