"""What a transform over several events keeps between batches, in words: to compare a changed transform with the state that the
former one left.

The transform service describes it from Spark's plan (`spark/transforms/state_plan.py`), and stores it with the checkpoint and
in the transform's mark. Equal descriptions have equal state: the same operators, in the same order, with the same keys and
values, computed from the same events. What a transform does with the results of the last operator is no part of it.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from services.core.pipe_file.transform import Transform
from services.core.units import format_duration
from services.core.yaml_source import Problem

FORMAT = 1
"""Of the description. Another format, or another Spark, describes the same transform in other words."""
USER_STATE = "user-written state"
"""The kind of an operator that is `transformWithState`."""
_DIGEST = re.compile(r" #[0-9a-f]{12}$")
_INTERVAL = re.compile(r"\binterval (?:day|hour|minute|second)(?: to (?:hour|minute|second))? (\d+)000\b")
"""A literal in microseconds."""
_ADDED = "isnotnull("
_LABELS = {
    "type": "the type of {}",
    "key": "the key of {}",
    "function": "the list of functions of {}",
    "condition": "the condition of {}",
    "left": "what {} keeps of its left side",
    "right": "what {} keeps of its right side",
    "filter": "the filter before {}",
    "input": "the input of {}",
    "tries": "the try_ functions of {}",
    "content": "the content of {}",
}
"""The parts of an operator, and their names in a message."""


class StateCheck(msgspec.Struct, frozen=True):
    """The result of `python -m spark.state_check`. problems: in the pipe file. failed: why Spark did not run; else ""."""

    problems: list[Problem] = []
    failed: str = ""


class StateOperator(msgspec.Struct, frozen=True):
    """kind: as in "aggregation". parts: by the keys of _LABELS. A long text is cut and ends with a digest of the whole."""

    kind: str
    parts: dict[str, list[str]]


class StatePlan(msgspec.Struct, frozen=True):
    """What decides about the meaning of a transform's state.

    operators: those with state, inner ones first. columns: the type of each column of a source or a table that they read.
    sources: that it reads. code: a digest of the Python file, where its functions decide, too; else "". spark: the version that
    planned it. text: `text_digest`. alone: of a transform that reads one union of several sources: by source, the operators
    without the others. ordered: of a checkpoint that knows its sources by their order, so that they cannot change.
    """

    operators: list[StateOperator]
    columns: dict[str, str]
    sources: list[str]
    code: str
    spark: str
    text: str
    format: int = FORMAT
    alone: dict[str, list[StateOperator]] = {}
    ordered: bool = False

    def of_each_source(self) -> dict[str, list[StateOperator]]:
        """What each source gives to the state; empty where the state needs several of them, as that of a join."""
        return {self.sources[0]: self.operators} if len(self.sources) == 1 else self.alone

    @property
    def kinds(self) -> set[str]:
        """Of its operators."""
        return {one.kind for one in self.operators}


def text_digest(
    transform: Transform, columns: Mapping[str, str | None], code: str, tables: Mapping[str, str] | None = None
) -> str:
    """Of all texts that a transform's state depends on. Equal digests: the same state, without a look at the plan.

    columns: as declared, by source. code: the Python file beside the pipe file; "" without one. tables: their columns, by name.
    """
    found: tuple[object, ...] = (
        transform.sql,
        transform.python,
        sorted(columns.items()),
        transform.watermark is None,
        code,
    )
    if tables:  # else the digest is that of earlier versions
        found = (*found, sorted(tables.items()))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def cut_text(text: str, shown: str, most: int = 160) -> str:
    """The text in a description. shown: for people; where that is not the whole text, a digest of the whole text follows."""
    cut = shown if len(shown) <= most else f"{shown[:most]}…"
    return text if cut == text else f"{cut} #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def compare_plans(former: StatePlan, now: StatePlan) -> str:
    """Why a transform cannot use the state of the former one; "" when it can."""
    if (former.format, former.spark) == (now.format, now.spark):
        return "; ".join(compare_state(former, now))
    return (
        "another version of Penstock described the former transform, so it is not known what changed. Start the former "
        "transform with this version first, then make the change"
    )


def compare_state(former: StatePlan, now: StatePlan) -> list[str]:
    """What changed, in words; empty: the state of the former transform is as if this one had left it.

    Sources of a union may come and go: Spark keeps the position of each by its name, and what the others gave to the state is as
    it was. One of them has to stay, which shows that the state means the same.
    """
    if former.ordered and former.sources != now.sources:
        sources = [", ".join(plan.sources) for plan in (former, now)]
        return [_say("the list of its sources", *sources) + ", and its checkpoint knows them by their order"]
    before, after = former.of_each_source(), now.of_each_source()
    pairs = [(before[source], after[source]) for source in after if source in before]
    found = [text for old, new in pairs or [(former.operators, now.operators)] for text in _compare_operators(old, new)]
    found += [
        _say(f"the column {column}", kind, now.columns[column])
        for column, kind in former.columns.items()
        if now.columns.get(column, kind) != kind
    ]
    if former.code != now.code:
        found.append("the text of its Python file changed, and its functions compute the state")
    if len(now.sources) == 1 and former.sources == now.sources:  # then nobody needs its name
        found = [re.sub(rf"(?<![\w-]){re.escape(now.sources[0])}\.", "", text) for text in found]
    return found


def _compare_operators(former: Sequence[StateOperator], now: Sequence[StateOperator]) -> list[str]:
    if [one.kind for one in former] != [one.kind for one in now]:
        return [f"it kept the state of {_count_kinds(former)}, now of {_count_kinds(now)}"]
    found = []
    for number, (old, new) in enumerate(zip(former, now, strict=True)):
        name = f"the {old.kind}" if len(now) == 1 else f"{old.kind} {number + 1}"
        for part, label in _LABELS.items():
            before, after = old.parts.get(part, []), new.parts.get(part, [])
            if before != after:
                found.append(_say(label.format(name), *_show(before, after, part)))
    return found


def _say(what: str, before: str, now: str) -> str:
    return f"{what} changed: {before}" if before == now else f"{what} was {before}, now {now}"


def _show(before: Sequence[str], now: Sequence[str], part: str) -> tuple[str, str]:
    """Both in words. Without the conditions that Spark adds itself, unless these are what changed."""
    if part == "filter":
        own = [[text for text in texts if not text.startswith(_ADDED)] for texts in (before, now)]
        before, now = own if own[0] != own[1] else (before, now)
    word = " and " if part in ("key", "filter", "condition") else ", "
    first, second = (word.join(_show_text(text) for text in texts) or "none" for texts in (before, now))
    return first, second


def _show_text(text: str) -> str:
    """The description for a person: without digests, with intervals as durations. Checkpoints keep the description unchanged."""
    return _INTERVAL.sub(lambda found: f"interval {format_duration(int(found[1]) / 1000)}", _DIGEST.sub("", text))


def _count_kinds(operators: Sequence[StateOperator]) -> str:
    kinds = [one.kind for one in operators]
    return " and ".join(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" for kind in kinds) or "nothing"
