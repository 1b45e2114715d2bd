"""One of Spark's plans: its Java nodes, one after the other; or as a tree in Python, from its JSON, and from Java what the JSON
does not have."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TRY = re.compile(r"\btry_\w+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a plan or of an expression. fields: values, and lists of expressions.

    Of a plan only: tries: calls of functions like try_cast. rows: the expressions of each row of an Expand. data: of a constant
    table.
    """

    kind: str
    fields: Mapping[str, Any]
    children: Sequence["Node"]
    tries: Sequence[str] = ()
    rows: Sequence[Sequence["Node"]] = ()
    data: str = ""


def read_plan(plan: Any) -> Node:
    """The plan's JSON has no word about ANSI mode, which a try_… function leaves, nor about some values: they are asked for."""
    return _read_node(plan, iter(json.loads(plan.toJSON())))


def _read_node(plan: Any, nodes: Iterator[Mapping[str, Any]]) -> Node:
    """plan: the same node as the next one."""
    fields = next(nodes)
    kind = str(fields["class"]).rpartition(".")[2]
    parts = items(plan.expressions())
    if kind == "Aggregate":
        parts = [part for each in parts for part in _java_functions(each)] + items(plan.groupingExpressions())
    tries = sorted(found.lower() for part in parts for found in _TRY.findall(str(part.sql())))
    rows = (
        [[_tree(json.loads(part.toJSON())) for part in items(row)] for row in items(plan.projections())]
        if kind == "Expand"
        else []
    )
    data = str(plan.data().toString()) if kind == "LocalRelation" else ""
    children = [_read_node(child, nodes) for child in items(plan.children())]
    return Node(kind, fields, children, tries, rows, data)


def _java_functions(expression: Any) -> Iterator[Any]:
    """The aggregate functions of an expression."""
    if expression.getClass().getSimpleName() == "AggregateExpression":
        yield expression
        return
    for child in items(expression.children()):
        yield from _java_functions(child)


def walk(plan: Any) -> Iterator[Any]:
    """The Java nodes of a plan, those of its subqueries included."""
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(items(node.children()))
        waiting.extend(items(node.innerChildren()) if node.nodeName() == "WithCTE" else ())
        waiting.extend(items(node.subqueries()))


def items(scala: Any) -> list[Any]:
    """The elements of a sequence of Scala."""
    return [scala.apply(index) for index in range(scala.size())]


def _tree(nodes: Iterable[Mapping[str, Any]]) -> Node:
    """An expression from its JSON: the first node, with its children, which follow it."""
    return _take(iter(nodes))


def _take(nodes: Iterator[Mapping[str, Any]]) -> Node:
    first = next(nodes)
    return Node(str(first["class"]).rpartition(".")[2], first, [_take(nodes) for _ in range(first["num-children"])])


def expressions_in(value: Any) -> list[Node]:
    """The expressions in a field: one, or a list of them, or lists of lists, or of tuples."""
    if isinstance(value, dict):
        return [one for item in value.values() for one in expressions_in(item)]
    if not isinstance(value, list) or not value:
        return []
    if isinstance(value[0], dict) and "class" in value[0]:
        return [_tree(value)]
    return [one for item in value for one in expressions_in(item)]
