"""What Spark's analysed plan says of a transform: whether it treats each event by itself, whether its result is the same when a
batch is computed again, and whether it may run in real-time mode.
"""

from collections.abc import Collection
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from spark.java import analyzed_plan
from spark.records import EVENT_TYPE
from spark.transforms.output import BadTransform
from spark.transforms.plan_tree import items, walk

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
_OVER_EVENTS = {
    "Aggregate": "GROUP BY or an aggregate function",
    "Window": "a window function (OVER)",
    "Sort": "ORDER BY",
}
_SOURCE_SIDE = {
    "Inner": "any",
    "Cross": "any",
    "LeftOuter": "left",
    "LeftSemi": "left",
    "LeftAnti": "left",
    "RightOuter": "right",
}


def check_repeatable(result: DataFrame) -> None:
    """Raise BadTransform when a batch that is computed again may have other results, or others left out."""
    if parts := nondeterministic_parts(result):
        raise BadTransform(
            f"gives another result when a batch is computed again after a crash: {', '.join(parts)}. "
            "Try: deriving ids and values from the event"
        )
    if parts := dropping_parts(result):
        raise BadTransform(
            f"would leave out events by chance: {', '.join(parts)}. Try: WHERE, or deduplicate_within for duplicates"
        )


def parts_over_events(result: DataFrame) -> list[str]:
    """The operators, in words of SQL, by which a row of the result may come from several events, or from state of other events.

    Without any, the transform may run on each micro-batch by itself. It may join tables that are not sources.
    """
    return sorted(_parts_over_events(analyzed_plan(result)))


def why_not_real_time(result: DataFrame, sources: int) -> str:
    """Why Spark's real-time mode cannot run this transform, as the end of a sentence; empty when it can, as far as is known.

    Spark has a list of the operators that it allows. sources: of the pipe.
    """
    plan = analyzed_plan(result)
    if any(node.nodeName() == "Join" for node in walk(plan)):
        return "joins tables, and real-time mode does not read them again"
    if _count_reads(plan, {}) > sources:
        return "reads a source more than once, which real-time mode cannot"
    return ""


_PASS_EVENT_ON = frozenset({"", "Alias", "GetStructField", "IsNull", "IsNotNull"})
"""Expressions that read one field of `event`, or none. Empty: it is a column of the result."""


def shows_all_of_event(result: DataFrame) -> bool:
    """Whether an expression gets `event` as a whole, and so its result may show each of its fields: to_json(event)."""
    event = StructType.fromDDL(EVENT_TYPE)
    assert isinstance(event, StructType)
    plan = analyzed_plan(result)
    return any(_gets_struct(part, event.names) for node in walk(plan) for part in items(node.expressions()))


def _gets_struct(expression: Any, fields: list[str], above: str = "") -> bool:
    """fields: the struct's first ones. above: the class of the expression that this one is an argument of."""
    kind = str(expression.getClass().getSimpleName())
    if kind == "AttributeReference":
        found = expression.dataType()
        is_struct = above not in _PASS_EVENT_ON and found.typeName() == "struct"
        return is_struct and list(found.fieldNames())[: len(fields)] == fields
    return any(_gets_struct(child, fields, kind) for child in items(expression.children()))


def _count_reads(plan: Any, shared: dict[int, Any]) -> int:
    """How often the sources are read. shared: the plans of WITH clauses, by id: each reference reads again."""
    name = str(plan.nodeName())
    if name == "SubqueryAlias" and plan.alias() == SOURCE_ALIAS:
        return 1
    if name == "CTERelationRef":
        return _count_reads(shared[plan.cteId()], shared)
    if name == "WithCTE":
        shared = shared | {each.id(): each.child() for each in items(plan.cteDefs())}
        return _count_reads(plan.plan(), shared)
    below = [*items(plan.children()), *items(plan.subqueries())]
    return sum(_count_reads(child, shared) for child in below)


def dropping_parts(result: DataFrame) -> list[str]:
    """Operators that leave out events by their number or because of others: on a stream, by chance."""
    return sorted(
        {_DROPPING[name] for node in walk(analyzed_plan(result)) if (name := str(node.nodeName())) in _DROPPING}
    )


def nondeterministic_parts(result: DataFrame) -> list[str]:
    """Expressions that give another result when a batch is computed again, such as rand() and uuid()."""
    found = []
    for node in walk(analyzed_plan(result)):
        found += [str(part.sql())[:100] for part in items(node.expressions()) if not part.deterministic()]
    return found


def watermarks(result: DataFrame) -> set[str]:
    """The columns over which a streaming result has watermarks."""
    return {
        str(node.eventTime().name()) for node in walk(analyzed_plan(result)) if node.nodeName() == "EventTimeWatermark"
    }


def _parts_over_events(plan: Any) -> set[str]:
    named, found = _named_queries_of_sources(plan), set[str]()
    for node in walk(plan):
        name = str(node.nodeName())
        if name == "Join":
            left, right = (_reads_sources(child, named) for child in items(node.children()))
            side = _SOURCE_SIDE.get(str(node.joinType().toString()).rstrip("$"))
            if left and right:
                found.add("a JOIN of streams")
            elif side is None or (left and side == "right") or (right and side == "left"):
                found.add("an outer JOIN that keeps rows without an event")
        elif name not in _ROW_BY_ROW and _reads_sources(node, named):
            found.add(_OVER_EVENTS.get(name, name))
    return found


def _named_queries_of_sources(plan: Any) -> set[int]:
    """The ids of those queries of WITH clauses that read sources, also through other such queries."""
    queries = {int(node.id()): node for node in walk(plan) if node.nodeName() == "CTERelationDef"}
    found: set[int] = set()
    while more := {name for name, query in queries.items() if name not in found and _reads_sources(query, found)}:
        found |= more
    return found


def _reads_sources(plan: Any, named: Collection[int]) -> bool:
    """named: `_named_queries_of_sources`."""
    return any(
        (node.nodeName() == "SubqueryAlias" and node.alias() == SOURCE_ALIAS)
        or (node.nodeName() == "CTERelationRef" and int(node.cteId()) in named)
        for node in walk(plan)
    )
