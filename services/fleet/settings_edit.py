"""Sets one key of a settings file (YAML). Everything else in the file, also its comments, stays unchanged."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from services.fleet.problem import CommandFailed

INDENT = 2


def set_key(path: Path, keys: Sequence[str], value: float) -> None:
    """Set `keys` (outermost first) to a number; creates the file when it is missing. Blocking.

    Raises CommandFailed when the file is not YAML, has a value where keys are needed, or cannot be written.
    """
    with _set_aside(path, keys, value) as scratch:
        scratch.replace(path)


def check_key(path: Path, keys: Sequence[str]) -> None:
    """Raise the errors of `set_key` without a change: to be called before the work that finds the number. Blocking."""
    with _set_aside(path, keys, 1.0):
        pass


@contextmanager
def _set_aside(path: Path, keys: Sequence[str], value: float) -> Iterator[Path]:
    """Write the changed text to a temporary file beside the original. Removes it afterwards."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = edit(old, keys, value)
        scratch.write_text(new, encoding="utf-8")
        if path.exists():
            scratch.chmod(path.stat().st_mode & 0o777)
        yield scratch
    except yaml.YAMLError as error:
        raise CommandFailed(f"{path} is not YAML: {error}", status=2) from error
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{path} cannot be changed: {error}", f"{'.'.join(keys)}: {value} by hand") from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def edit(text: str, keys: Sequence[str], value: float) -> str:
    """The text with the key set. Raises ValueError when the text has a value where keys are needed, and yaml.YAMLError."""
    wanted = _with(yaml.safe_load(text), keys, value)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    new = _insert(text, node, keys, value)
    if yaml.safe_load(new) != wanted:
        raise ValueError("it is written in a way that only a person can add to")
    return new


def _with(data: Any, keys: Sequence[str], value: float) -> Any:
    if not keys:
        return value
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"keys and values are needed where {keys[0]} should go")
    found = dict(data or {})
    found[keys[0]] = _with(found.get(keys[0]), keys[1:], value)
    return found


def _insert(text: str, node: yaml.Node | None, keys: Sequence[str], value: float) -> str:
    """Add the missing keys to the deepest existing mapping, before its other keys, in its own style."""
    if node is None:
        return text + ("" if not text or text.endswith("\n") else "\n") + _block(keys, value, 0) + "\n"
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("keys and values are needed")  # noqa: TRY004 the text is wrong, not a type
    for key, child in node.value:
        if key.value != keys[0]:
            continue
        if len(keys) == 1:
            return text[: child.start_mark.index] + str(value) + text[child.end_mark.index :]
        if isinstance(child, yaml.MappingNode) and (child.value or child.flow_style):
            return _insert(text, child, keys[1:], value)
        behind = key.end_mark.index + 1  # the value is empty: `groups:`
        return text[:behind] + " " + _flow(keys[1:], value) + text[max(behind, child.end_mark.index) :]
    start = node.start_mark.index
    if node.flow_style:
        return text[: start + 1] + _entry(keys, value) + (", " if node.value else "") + text[start + 1 :]
    column = node.start_mark.column
    return text[:start] + _block(keys, value, column).lstrip() + "\n" + " " * column + text[start:]


def _block(keys: Sequence[str], value: float, column: int) -> str:
    lines = [" " * (column + INDENT * depth) + f"{key}:" for depth, key in enumerate(keys)]
    return "\n".join(lines) + f" {value}"


def _entry(keys: Sequence[str], value: float) -> str:
    return f"{keys[0]}: {_flow(keys[1:], value)}" if len(keys) > 1 else f"{keys[0]}: {value}"


def _flow(keys: Sequence[str], value: float) -> str:
    return "{" + _entry(keys, value) + "}"
