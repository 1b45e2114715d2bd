"""What kind of transform it is, read from the plan that Spark made of it."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

SOURCE_ALIAS = "_penstock_source"
"""The alias that marks the source frames of an analysis."""

_ROW_BY_ROW = frozenset(
    {
        *("Project", "Filter", "Generate", "Union", "SubqueryAlias", "View", "ResolvedHint"),
        *("LocalRelation", "LogicalRDD", "OneRowRelation", "Range"),
        *("WithCTE", "CTERelationDef", "CTERelationRef"),
        *("MapInArrow", "MapInPandas", "PythonMapInArrow"),
    }
)
_DROPPING = {
    "GlobalLimit": "LIMIT",
    "LocalLimit": "LIMIT",
    "Offset": "OFFSET",
    "Tail": "tail",
    "Sample": "TABLESAMPLE",
    "Distinct": "DISTINCT",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
}
_SOURCE_SIDE = {
    "Inner": "any",
    "Cross": "any",
    "LeftOuter": "left",
    "LeftSemi": "left",
    "LeftAnti": "left",
    "RightOuter": "right",
}


def is_stateless(result: DataFrame) -> bool:
    """Whether each row of the result comes from one event and from nothing that other events leave behind.

    Such a transform may run on each micro-batch by itself. Joins with tables that are not sources are included.
    """
    return _is_row_by_row(_analyzed(result))


def dropping_parts(result: DataFrame) -> list[str]:
    """Operators that leave out events by their number or by others, which on a stream means: by chance."""
    return sorted({_DROPPING[name] for node in _walk(_analyzed(result)) if (name := str(node.nodeName())) in _DROPPING})


def nondeterministic_parts(result: DataFrame) -> list[str]:
    """Expressions that give another result when a batch is computed again, such as rand() and uuid()."""
    found = []
    for node in _walk(_analyzed(result)):
        found += [str(part.sql())[:100] for part in _items(node.expressions()) if not part.deterministic()]
    return found


def watermarks(result: DataFrame) -> set[str]:
    """The columns over which a streaming result has watermarks."""
    return {
        str(node.eventTime().name()) for node in _walk(_analyzed(result)) if node.nodeName() == "EventTimeWatermark"
    }


def _analyzed(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _is_row_by_row(plan: Any) -> bool:
    for node in _walk(plan):
        name = str(node.nodeName())
        if name == "Join":
            left, right = (_reads_sources(child) for child in _items(node.children()))
            side = _SOURCE_SIDE.get(str(node.joinType().toString()).rstrip("$"))
            if (left and right) or side is None or (left and side == "right") or (right and side == "left"):
                return False
        elif name not in _ROW_BY_ROW and _reads_sources(node):
            return False
    return True


def _reads_sources(plan: Any) -> bool:
    return any(node.nodeName() == "SubqueryAlias" and node.alias() == SOURCE_ALIAS for node in _walk(plan))


def _walk(plan: Any) -> Iterator[Any]:
    """The plan's nodes, those of its subqueries included."""
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(_items(node.children()))
        waiting.extend(_items(node.innerChildren()) if node.nodeName() == "WithCTE" else ())
        waiting.extend(_items(node.subqueries()))


def _items(scala: Any) -> list[Any]:
    return [scala.apply(index) for index in range(scala.size())]
