"""YAML as configuration: plain data, and the line of every key, so that an error names `file:line: key`. Models check the data.

Beyond YAML's own errors it refuses duplicate keys (the last one would silently count), aliases (alias bombs), several
documents, tags, files over 1 MB, and nesting over 50 levels.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.core.pipe_file.snapshot import source_of
from services.core.security.masking import mask_text

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 50
_ITEM_NAME = re.compile(r"[\w-]{1,63}", re.ASCII)
_PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}

KeyPath = tuple[str | int, ...]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a file, a flag or a variable. `where`: "file:line", "--flag" or "PENSTOCK_X"; `key` may be empty."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        text = f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"
        return mask_text(text)  # a misplaced secret may be a key or part of a message

    def as_json(self) -> dict[str, str]:
        """With masked secrets."""
        return {"where": self.where, "key": mask_text(self.key), "message": mask_text(self.message)}


class BadConfiguration(Exception):
    """The configuration cannot be used. It has all problems at once. Programs exit with status 2."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file. `lines` maps the path of every key and item to its 1-based line.

    text_lines: the line at which a text begins, where the file has it line by line as it is: `|`, or all on one line.
    """

    path: Path
    data: Any
    lines: dict[KeyPath, int]
    text_lines: dict[KeyPath, int] = field(default_factory=dict)

    def problem(self, path: KeyPath, message: str, text_line: int | None = None) -> Problem:
        """A problem at this key, or at its nearest ancestor in the file. text_line: the line, from 1, in the text of this key."""
        known = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in self.lines), ())
        line = self.lines.get(known, 1)
        if text_line is not None and path in self.text_lines:
            line = self.text_lines[path] + text_line - 1
        return Problem(f"{self.path}:{line}", self._show(path), message)

    def _show(self, path: KeyPath) -> str:
        """The path for a person: an item of a list by its name (`destinations[billing]`) if it has one, else by its index."""
        shown, data = "", self.data
        for part in path:
            if isinstance(data, Mapping):
                data = data.get(part)
            else:
                data = data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None
            name = data.get("name") if isinstance(part, int) and isinstance(data, Mapping) else None
            is_shown = isinstance(name, str) and _ITEM_NAME.fullmatch(name)
            shown += f"[{name}]" if is_shown else f".{part}" if shown else str(part)
        return shown


def load_yaml(path: Path) -> Document:
    """Read and parse one file (`snapshot.source_of`). Blocking. Raises BadConfiguration, also for an unreadable file."""
    try:
        with source_of(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise BadConfiguration([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise BadConfiguration([Problem(f"{path}:{line}", "", "is not UTF-8 text")]) from error
    if len(raw) > MAX_FILE_BYTES:
        raise BadConfiguration([Problem(str(path), "", f"is larger than {MAX_FILE_BYTES} bytes")])
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> Document:
    """Parse YAML text. path: for messages. The data of an empty text is None. Raises BadConfiguration."""
    try:
        _refuse_bombs(text, path)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadConfiguration(
            [Problem(f"{path}:{line}", "", f"not valid YAML: {error.problem}{_hint(error, line, text)}")]
        ) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BadConfiguration([Problem(f"{path}:{line}", "", "has a character that YAML does not allow")]) from error
    builder = _Builder(path)
    data = builder.build(node, ()) if node is not None else None
    if builder.problems:
        raise BadConfiguration(builder.problems)
    return Document(path, data, builder.lines, builder.text_lines)


def _hint(error: yaml.MarkedYAMLError, line: int, text: str) -> str:
    """The likely mistake in the file, after the parser's words; "" when it is not known."""
    problem = error.problem or ""
    if "'\\t'" in problem:
        return ". Try: use spaces"
    is_indented = "<block end>" in problem and problem.endswith(("start>'", "'-'", "'?'"))
    if "mapping values" in problem and error.problem_mark:
        before = text[: error.problem_mark.index].rpartition("\n")[2]
        if not (is_indented := re.fullmatch(r"\s*[\w-]+\s*", before) is not None):
            return " (a second `: `). Try: the text in quotes, or on lines of its own below `key: |`"
    if is_indented:
        return f"; line {line} is indented differently from the lines above"
    return ""


def _refuse_bombs(text: str, path: Path) -> None:
    """Check the YAML events before data is built: a small file must not become large or slow."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"{path}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise BadConfiguration([Problem(where, "", "aliases (*name) are not allowed. Try: write the value again")])
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise BadConfiguration([Problem(where, "", f"more than {MAX_DEPTH} levels deep")])


class _Builder:
    """Turns YAML nodes into plain data, remembering lines and collecting problems."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[KeyPath, int] = {}
        self.text_lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._scalars = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
            self._problem(node, path, f"{node.tag} is not allowed")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            self._record_text(node, path)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError):
            self._problem(node, path, f"{node.tag} is not allowed")
            return None

    def _record_text(self, node: yaml.ScalarNode, path: KeyPath) -> None:
        first = node.start_mark.line + 1
        if node.style == "|":
            self.text_lines[path] = first + 1
        elif node.style != ">" and node.start_mark.line == node.end_mark.line:
            self.text_lines[path] = first

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str) or key == "<<":
                self._problem(key_node, path, "keys must be plain text")
                continue
            if key in data:
                self._problem(key_node, (*path, key), f"occurs twice; first at line {self.lines[(*path, key)]}")
                continue
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = self.build(value_node, (*path, key))
        return data

    def _problem(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        key = ".".join(str(part) for part in path)
        self.problems.append(Problem(f"{self.path}:{node.start_mark.line + 1}", key, message))


_CLOSE = 0.7
"""The least similarity of an unknown key and the key that may be meant."""

Model = TypeVar("Model", bound=BaseModel)

_KEYS, _WHOLE, _BOOLEAN = "keys and values are needed", "a whole number is needed", "true or false is needed"
_WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "model_type": _KEYS,
    "dict_type": _KEYS,
    "list_type": "a list is needed",
    "string_type": "a text is needed",
    "path_type": "a path is needed",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""By pydantic's type of error; others keep pydantic's message."""


def validate_document(document: Document, model: type[Model]) -> Model:
    """The document as this model. Raises BadConfiguration with every problem at once, each at its line.

    A key that is missing because it is misspelled is one problem, not two. So is a value that fits none of several forms.
    """
    try:
        return model.model_validate({} if document.data is None else document.data)
    except ValidationError as error:
        meant = _meant_keys(model, document.data, error)
        found = {(*path[:-1], name) for path, name in meant.items()}
        said: dict[KeyPath, list[str]] = {}
        for path, item in _of_meant_forms(document.data, error):
            if item["type"] != "missing" or path not in found:
                question = f"; did you mean {meant[path]}?" if path in meant else ""
                said.setdefault(path, []).append(describe(item) + question)
        raise BadConfiguration([document.problem(path, ", or ".join(words)) for path, words in said.items()]) from None


def _of_meant_forms(data: Any, error: ValidationError) -> list[tuple[KeyPath, ErrorDetails]]:
    """The errors with their paths. Where a value may have several forms, pydantic has errors of each: those of forms that the
    value does not have are left out, if it has another one."""
    items = [(known_path(data, item), item) for item in error.errors(include_url=False, include_input=False)]
    fit = {path[:n] for path, item in items for n in range(len(path) + (not _is_other_form(item)))}
    return [(path, item) for path, item in items if not _is_other_form(item) or path not in fit]


def _is_other_form(item: ErrorDetails) -> bool:
    return item["type"].endswith("_type")


def with_meant_keys(data: Any, model: type[BaseModel]) -> Any:
    """The data, with the key that is meant in place of each misspelled one: for further checks, which else find consequences."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        meant, data = _meant_keys(model, data, error), deepcopy(data)
        for path in sorted(meant, key=len, reverse=True):
            parent = data
            for part in path[:-1]:
                parent = parent[part]
            parent.setdefault(meant[path], parent.pop(path[-1]))
    return data


def readable_part(data: Any, model: type[Model]) -> Model | None:
    """What is left of the data without its mistakes, for further checks; None when too little is left.

    A misspelled key counts as the one that is meant. No item leaves its list, so every key that is left keeps its path.
    """
    data = deepcopy(with_meant_keys(data, model))
    while True:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            items = error.errors(include_url=False, include_input=False)
        wrong = [_innermost(data, known_path(data, item)) for item in items]
        for found in wrong:
            if found is None:
                return None
            parent, key = found
            parent.pop(key, None)  # several mistakes may have one key


def _innermost(data: Any, path: KeyPath) -> tuple[dict[Any, Any], str | int] | None:
    """The last key on this path that the data has, with the mapping that it is in; None when it has none."""
    found = None
    for part in path:
        if isinstance(data, dict) and part in data:
            found = data, part
        elif not isinstance(data, list) or not isinstance(part, int) or part >= len(data):
            break
        data = data[part]
    return found


def _meant_keys(model: type[BaseModel], data: Any, error: ValidationError) -> dict[KeyPath, str]:
    """By the path of each unknown key: the key of its place that it is close to."""
    items = error.errors(include_url=False, include_input=False)
    paths = [known_path(data, item) for item in items if item["type"] == "extra_forbidden"]
    return {path: name for path in paths if (name := _guess_key(model, path))}


def _guess_key(model: type[BaseModel], path: KeyPath) -> str:
    """The key that is probably meant by this unknown one; "" when none is close."""
    root = model.model_json_schema()
    nodes = _alternatives(root, root)
    for part in path[:-1]:
        nodes = [found for node in nodes for child in _children(node, part) for found in _alternatives(root, child)]
    known = {name for node in nodes for name in node.get("properties", {})}
    close = get_close_matches(str(path[-1]), known, n=1, cutoff=_CLOSE)
    return close[0] if close else ""


def _alternatives(root: Schema, node: Schema) -> list[Schema]:
    """The node of a JSON Schema itself, or the nodes that it refers to."""
    if "$ref" in node:
        return _alternatives(root, root["$defs"][node["$ref"].rpartition("/")[2]])
    return [node, *(found for other in node.get("anyOf", []) for found in _alternatives(root, other))]


def _children(node: Schema, part: str | int) -> list[Schema]:
    """The nodes for a key, or for the items of a list."""
    if part in node.get("properties", {}):
        return [node["properties"][part]]
    rest = [node.get("items"), node.get("additionalProperties"), *node.get("patternProperties", {}).values()]
    return [child for child in rest if isinstance(child, dict)]


def known_path(data: object, item: ErrorDetails) -> KeyPath:
    """The part of an error's location that is in the data, and the missing key (pydantic adds names of union branches,
    and `[key]` for a key itself)."""
    path: list[str | int] = []
    loc, is_missing = item["loc"], item["type"] == "missing"
    for index, part in enumerate(loc):
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif index < len(loc) - 1 or not is_missing:
            continue
        path.append(part)
    return tuple(path)


def describe(error: ErrorDetails) -> str:
    """A pydantic error for an operator, without the value, which may be a secret."""
    words = _WORDS.get(error["type"])
    return words.format(**error.get("ctx", {})) if words else error["msg"].removeprefix("Value error, ")
