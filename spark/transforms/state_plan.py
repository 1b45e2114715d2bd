"""Describes what a transform keeps between batches (`services.core.pipe_file.state_plan`), from Spark's optimised plan.

The optimised plan decides, not the text: Spark moves a filter on a key before the aggregation, and keeps no function whose
result nobody uses. Names inside of the query, comments and the order of conditions do not matter. Columns are followed back to
those of the sources.

A description may call two equal transforms different, never two different ones equal.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from services.core.pipe_file.state_plan import USER_STATE, StateOperator, StatePlan, cut_text
from services.core.units import format_duration
from spark.java import optimized_plan
from spark.records import EVENT, EVENT_TIME, VALUE
from spark.session import own_session
from spark.transforms.plan_tree import Node, expressions_in, read_plan
from spark.transforms.user_state import NODE

_PLACE = "file:///penstock*/"
"""Before the name of a stream, as the path of its source. A pattern: Spark looks for a folder of another name."""
_SOURCE = "StreamingRelation"
_WITHOUT_STATE = frozenset(
    {"Project", "Filter", "Generate", "Expand", "Union", "EventTimeWatermark", "ResolvedHint", _SOURCE}
)
_OF_PYTHON = re.compile(r"Python|Pandas|Arrow|TransformWithState|FlatMapGroups")
_SIGNS = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "Add": "+",
    "Subtract": "-",
    "Multiply": "*",
    "Divide": "/",
    "Remainder": "%",
    "TimestampAddInterval": "+",
}
_SYMMETRIC = ("EqualTo", "EqualNullSafe")
_NO_CONTENT = frozenset(
    {
        *(
            "class",
            "num-children",
            "exprId",
            "resultId",
            "qualifier",
            "metadata",
            "explicitMetadata",
            "nullable",
            "hint",
        ),
        *("nonInheritableMetadataKeys", "timeZoneId", "nodeId", "mode", "jvmId", "isStreaming"),
        *("mutableAggBufferOffset", "inputAggBufferOffset"),
    }
)
_LONG = 200


def describe_state(
    session: SparkSession,
    apply: Callable[[SparkSession, Mapping[str, DataFrame]], DataFrame],
    views: Mapping[str, StructType],
    *,
    watermarked: Callable[[DataFrame], DataFrame],
    code: str,
    text: str,
    tables: Mapping[str, StructType] | None = None,
) -> StatePlan:
    """views: the columns of each source view; NOT NULL as declared. apply: to the output records. code, text: as in StatePlan.
    tables: the columns of each table.

    Nothing runs. Raises the errors of the analysis.
    """
    own = own_session(session)
    own.conf.set(
        "spark.sql.streaming.unsupportedOperationCheck", "false"
    )  # else Spark optimises no stream before its start
    own.conf.set("spark.sql.optimizer.excludedRules", "")  # descriptions stay as they were before some were off
    frames = {stream: watermarked(_empty_stream(own, stream, columns)) for stream, columns in views.items()}
    plan, types = read_plan(optimized_plan(apply(own, frames))), _types(views)
    found = _Reader(plan, types, tables or {})
    alone = {source: _Reader(plan, types, tables or {}, only=source) for source in _sources_of_union(plan)}
    columns = {name: kind for one in (found, *alone.values()) for name, kind in one.columns.items()}
    return StatePlan(
        found.operators,
        dict(sorted(columns.items())),
        found.sources,
        hashlib.sha256(code.encode()).hexdigest() if found.runs_python else "",
        pyspark.__version__,
        text,
        alone={source: one.operators for source, one in alone.items()},
    )


def _empty_stream(session: SparkSession, stream: str, columns: StructType) -> DataFrame:
    """A stream with these columns that never runs."""
    nullable = StructType([StructField(one.name, one.dataType) for one in columns.fields])
    return session.readStream.schema(nullable).format("json").load(_PLACE + stream)


def _types(views: Mapping[str, StructType]) -> dict[str, str]:
    """Of the declared columns, by stream and name."""
    return {
        f"{stream}.{one.name}": one.dataType.simpleString().upper() + ("" if one.nullable else " NOT NULL")
        for stream, columns in views.items()
        for one in columns.fields
        if one.name not in (EVENT, VALUE, EVENT_TIME)
    }


@dataclass(frozen=True, slots=True)
class _Relation:
    """The rows that a node returns. text: where from. filters: those that hold for them. output: ids of its columns."""

    text: str
    filters: frozenset[str]
    output: Sequence[int]

    @property
    def full(self) -> str:
        return f"{self.text} where {' and '.join(sorted(self.filters))}" if self.filters else self.text


class _Reader:
    """Reads one plan, once."""

    def __init__(self, plan: Node, types: Mapping[str, str], tables: Mapping[str, StructType], only: str = "") -> None:
        """only: of the sources of a union, the one that is described, as if there was no other."""
        self.operators: list[StateOperator] = []
        self.columns: dict[str, str] = {}
        self.sources = list(dict.fromkeys(_sources(plan)))
        self.runs_python = False
        self._only = only
        self._types, self._texts = types, dict[int, str]()
        self._tables, self._of_tables = tables, dict[str, dict[str, str]]()
        self._find(plan)

    def _find(self, node: Node) -> None:
        """The operators of this part of the plan. What is above the last of them is left out."""
        if _has_state(node):
            self._relation(node)
            return
        for child in node.children:
            self._find(child)

    def _relation(self, node: Node) -> _Relation:
        self.runs_python = self.runs_python or bool(_OF_PYTHON.search(node.kind))
        found = self._describe(node)
        if not node.tries or _has_state(node):  # else they are a part of the operator
            return found
        return _Relation(found.text, found.filters | {f"({', '.join(node.tries)})"}, found.output)

    def _describe(self, node: Node) -> _Relation:
        if node.kind == _SOURCE:
            return self._source(node)
        below = [self._relation(child) for child in node.children]
        match node.kind:
            case "Project":
                output = [self._define(one) for one in expressions_in(node.fields["projectList"])]
                return _Relation(below[0].text, below[0].filters, output)
            case "Filter":
                (condition,) = expressions_in(node.fields["condition"])
                return _Relation(below[0].text, below[0].filters | set(self._conditions(condition)), below[0].output)
            case "EventTimeWatermark" | "ResolvedHint":
                return below[0]
            case "Aggregate" if _reads_source(node):
                return self._aggregation(node, below[0])
            case "Join" if all(map(_reads_source, node.children)):
                return self._join(node, *below)
            case "Expand":
                return self._expand(node, below[0])
            case "Union":
                return self._union(node, below)
            case _ if _has_state(node):
                return self._other(node, below)
            case _:
                return self._plain(node, below)

    def _source(self, node: Node) -> _Relation:
        output = []
        for column in expressions_in(node.fields["output"]):
            name = str(column.fields["name"])
            self._texts[_id(column)] = f"{_stream(node)}.{name}"
            output.append(_id(column))
        return _Relation(_stream(node), frozenset(), output)

    def _aggregation(self, node: Node, below: _Relation) -> _Relation:
        keys = [self._text(one) for one in expressions_in(node.fields["groupingExpressions"])]
        results = expressions_in(node.fields["aggregateExpressions"])
        functions = list(dict.fromkeys(self._text(one) for result in results for one in _functions(result)))
        name = self._add("aggregation", node, below, key=keys, function=functions)
        output = [self._define(one, prefix=f"{name}: ") for one in results]
        return _Relation(name, frozenset(), output)

    def _join(self, node: Node, left: _Relation, right: _Relation) -> _Relation:
        conditions = [text for one in expressions_in(node.fields.get("condition")) for text in self._conditions(one)]
        kind = str(node.fields["joinType"]["object"]).rpartition(".")[2].rstrip("$").lower()
        columns = [[self._texts[one] for one in side.output] for side in (left, right)]
        parts = {"type": [kind], "condition": conditions, "left": columns[0], "right": columns[1]}
        name = self._add("join of streams", node, left, right, **parts)
        return _Relation(name, frozenset(), [*left.output, *([] if kind in ("leftsemi", "leftanti") else right.output)])

    def _other(self, node: Node, below: Sequence[_Relation]) -> _Relation:
        if node.kind == NODE:
            return self._user_state(node, below[0])
        name = self._add(node.kind, node, *below, content=[self._content(node)])
        return _Relation(name, frozenset(), [one for each in below for one in each.output])

    def _user_state(self, node: Node, below: _Relation) -> _Relation:
        """Its code decides about the state, and is compared as a whole. Its other child is an empty initial state."""
        keys = [self._texts[one] for one in below.output[: int(node.fields["groupingAttributesLen"])]]
        time_mode = str(node.fields["timeMode"]["object"]).rpartition(".")[2].rstrip("$")
        name = self._add(USER_STATE, node, below, key=keys, content=[f"timeMode {time_mode}"])
        output = [self._define(one, f"{name}: ") for one in expressions_in(node.fields["outputAttrs"])]
        return _Relation(name, frozenset(), output)

    def _add(self, kind: str, node: Node, *inputs: _Relation, **parts: list[str]) -> str:
        """Another operator. Returns its name in the description of others."""
        several = len(inputs) > 1
        found = {
            "tries": list(node.tries),
            "input": [one.full for one in inputs] if several else [inputs[0].text],
            "filter": [] if several else sorted(inputs[0].filters),
            **parts,
        }
        self.operators.append(
            StateOperator(
                kind, {name: [cut_text(one, _show(one)) for one in texts] for name, texts in found.items() if texts}
            )
        )
        return f"{kind} {len(self.operators)}"

    def _expand(self, node: Node, below: _Relation) -> _Relation:
        """Several rows for each row: a window that slides."""
        rows = [[self._text(one) for one in row] for row in node.rows]
        output = [_id(one) for one in expressions_in(node.fields["output"])]
        for place, column in enumerate(output):
            texts = list(dict.fromkeys(row[place] for row in rows))
            self._texts[column] = texts[0] if len(texts) == 1 else _keep(" | ".join(texts))
        return _Relation(f"{below.text} in {len(rows)} rows each", below.filters, output)

    def _union(self, node: Node, below: Sequence[_Relation]) -> _Relation:
        """Its columns are those of its first child."""
        if self._only:
            (kept,) = (one for one, child in zip(below, node.children, strict=True) if self._only in _sources(child))
            texts = [self._texts[column] for column in kept.output]
            self._texts.update(zip(below[0].output, texts, strict=True))
            return replace(kept, output=below[0].output)
        rows = [f"{one.full} ({', '.join(self._texts[column] for column in one.output)})" for one in below]
        union = _keep(f"union of {' and '.join(rows)}")
        for place, column in enumerate(below[0].output):
            self._texts[column] = f"column {place + 1}"
        return _Relation(union, frozenset(), below[0].output)

    def _plain(self, node: Node, below: Sequence[_Relation]) -> _Relation:
        """A node without state that is described by all of its content, for instance a join with a table."""
        text = _keep(
            f"{node.kind}({', '.join(filter(None, [self._content(node), node.data, *(one.full for one in below)]))})"
        )
        output = [one for each in below for one in each.output]
        for name in ("generatorOutput", "output", "resultAttrs"):
            for column in expressions_in(node.fields.get(name)):
                self._texts.setdefault(_id(column), f"{text}.{column.fields['name']}")
                if not node.children:
                    self._of_tables[self._texts[_id(column)]] = self._table_types(str(column.fields["name"]))
                output.append(_id(column))
        return _Relation(text, frozenset(), output)

    def _table_types(self, column: str) -> dict[str, str]:
        """Of this column, in each table that has one: the plan does not say which table it is."""
        return {
            f"{table}.{one.name}": one.dataType.simpleString().upper()
            for table, columns in self._tables.items()
            for one in columns.fields
            if one.name == column
        }

    def _define(self, node: Node, prefix: str = "") -> int:
        """A column of a projection. Returns its id."""
        text = prefix + self._text(node)
        self._texts[_id(node)] = _keep(text)
        return _id(node)

    def _conditions(self, node: Node) -> list[str]:
        if node.kind == "And":
            return [text for child in node.children for text in self._conditions(child)]
        return [self._text(node)]

    def _text(self, node: Node) -> str:
        """An expression, with the columns of the sources in place of the query's own names."""
        self.runs_python = self.runs_python or bool(_OF_PYTHON.search(node.kind))
        if node.kind == "AttributeReference":
            text = self._texts.get(_id(node), str(node.fields["name"]))
            if text in self._types:
                self.columns[text] = self._types[text]
            self.columns.update(self._of_tables.get(text, {}))
            return text
        if node.kind == "Literal":
            return _literal(node.fields)
        texts = [self._text(child) for child in node.children]
        if node.kind in _SIGNS and len(texts) == 2:
            return f"({f' {_SIGNS[node.kind]} '.join(sorted(texts) if node.kind in _SYMMETRIC else texts)})"
        return self._call(node, texts)

    def _call(self, node: Node, texts: Sequence[str]) -> str:
        """An expression with these texts as its children."""
        match node.kind:
            case "Alias" | "KnownNullable":
                return texts[0]
            case "AggregateExpression" if not node.fields.get("isDistinct"):
                return " where ".join(texts)
            case "Cast":
                return f"cast({texts[0]} as {self._details(node)[0].removeprefix('as ')})"
            case "GetStructField":
                return f"{texts[0]}.{node.fields.get('name') or node.fields['ordinal']}"
            case "And" | "Or":
                return f"({f' {node.kind.lower()} '.join(sorted(texts))})"
            case "CreateNamedStruct":
                return f"named_struct({', '.join(texts)})"
            case _:
                return f"{node.kind.lower()}({', '.join([*texts, *self._details(node, texts)])})"

    def _content(self, node: Node) -> str:
        return ", ".join(self._details(node))

    def _details(self, node: Node, children: Sequence[str] = ()) -> list[str]:
        """The fields of a node, without its children. children: their texts."""
        values = [value for name, value in node.fields.items() if name not in _NO_CONTENT or name == "num-children"]
        places = [one for value in values for one in (value if isinstance(value, list) else [value])]
        numbers = [one for one in places if isinstance(one, int) and not isinstance(one, bool)]
        are_places = sorted(numbers) == sorted([*range(len(node.children)), len(node.children)])
        found = []
        for name, value in node.fields.items():
            if name in _NO_CONTENT or value in (None, [], {}):
                continue
            if exprs := expressions_in(value):
                found += [text for one in exprs if (text := self._text(one)) not in children]
            elif isinstance(value, dict):
                found.append(str(value.get("object", json.dumps(value, sort_keys=True))).rpartition(".")[2].rstrip("$"))
            elif isinstance(value, bool | str) or not are_places:
                found.append(f"as {value}" if name == "dataType" else f"{name} {value}")
        return found


def _has_state(node: Node) -> bool:
    if node.kind in _WITHOUT_STATE or not _reads_source(node):
        return False
    if node.kind == "Join":
        return all(map(_reads_source, node.children))
    return not node.kind.startswith(("MapIn", "PythonMapIn", "ArrowEval", "BatchEval"))


def _reads_source(node: Node) -> bool:
    return any(one.kind == _SOURCE for one in _walk(node))


def _sources(node: Node) -> Iterator[str]:
    """The streams that a part of a plan reads, one after the other."""
    return (_stream(one) for one in _walk(node) if one.kind == _SOURCE)


def _sources_of_union(plan: Node) -> list[str]:
    """The sources of a plan that reads all of them by its only union: one by each child, without state before. Else none."""
    unions = [one for one in _walk(plan) if one.kind == "Union"]
    children = [child for one in unions for child in one.children]
    found = [source for child in children for source in _sources(child)]
    is_plain = len(unions) == 1 and not any(_has_state(one) for child in children for one in _walk(child))
    is_each_once = len(found) == len(set(found)) == len(children) == len(list(_sources(plan)))
    return found if is_plain and is_each_once and all(map(_reads_source, children)) else []


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _functions(node: Node) -> Iterator[Node]:
    """The aggregate functions of an expression, in Spark's order, which is that of their values in the state."""
    if node.kind == "AggregateExpression":
        yield node
        return
    for child in node.children:
        yield from _functions(child)


def _id(node: Node) -> int:
    return int(node.fields["exprId"]["id"])


def _stream(source: Node) -> str:
    return str(source.fields["sourceName"]).rpartition("/")[2].rstrip("]")


def _literal(fields: Mapping[str, Any]) -> str:
    kind, value = fields["dataType"], fields.get("value")
    if value is None:
        return "null"
    if kind == "string":
        return "'" + str(value).replace("'", "''") + "'"
    return str(value) if kind in ("integer", "long", "boolean", "double") else f"{kind} {value}"


def _keep(text: str) -> str:
    """The text inside of others: they would grow with each step."""
    return text if len(text) <= _LONG else cut_text(text, _show(text))


_SLIDE, _LENGTH, _SESSION = re.compile(r"% (\d+)\)"), re.compile(r"\+ (\d+)\)"), re.compile(r"\+ [^()]*?([\d.]+ \w+)\)")


def _show(text: str) -> str:
    """A window in the words of the query; else the text."""
    if not text.startswith("named_struct('start', ") or "precisetimestampconversion" not in text:
        return text
    slides, lengths = _SLIDE.findall(text), _LENGTH.findall(text)
    if not slides or not lengths:
        gap = _SESSION.findall(text)
        return f"session_window({gap[-1]})" if gap else "session_window"
    length, slide = (format_duration(int(found) / 1e6) for found in (lengths[-1], slides[0]))
    return f"window({length})" if length == slide else f"window({length}, every {slide})"
