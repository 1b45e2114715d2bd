"""What `penstock schemas diff`, `check` and `push` show of differences, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from services.fleet.verbs import schemas

ADDED = {
    "path": "/fields/1",
    "rule": "FIELD_NEEDS_DEFAULT",
    "breaks": "BACKWARD",
    "reader": {"name": "user", "type": "long"},
    "writer": None,
    "message": "The reader's field user of Click has no default, and the writer lacks the field.",
    "fix": [{"op": "add", "path": "/fields/1/default", "value": 0}],
    "version": 3,
}
CHANGED = {
    "subject": "com.acme.Click",
    "path": "",
    "rule": "TYPE_CHANGED",
    "breaks": "FORWARD",
    "reader": "string",
    "writer": "int",
    "message": "The reader has string, the writer int\x1b[2J.",
    "fix": None,
}


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    out = io.StringIO()
    monkeypatch.setattr(
        schemas,
        "OUT",
        Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=200),
    )
    schemas.print_differences([ADDED, CHANGED])
    return out.getvalue()


def test_both_sides_are_old_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: of a change that breaks FORWARD the new type stands on the line of the old one, where a person removes it."""
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert lines[0] == "/fields/1 against version 3  FIELD_NEEDS_DEFAULT breaks BACKWARD"
    assert '  + new  {"name": "user", "type": "long"}' in lines
    assert '  fix    {"op": "add", "path": "/fields/1/default", "value": 0}' in lines
    assert [line for line in lines if line.startswith("  -")] == ["  - old  string"]
    assert "com.acme.Click /  TYPE_CHANGED breaks FORWARD" in lines
    assert "  + new  int" in lines


def test_a_terminal_has_colours_and_no_text_of_a_client_moves_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a schema's text clears the terminal of who reads the differences."""
    said = shown(monkeypatch, terminal=True)
    assert "\x1b[31m  - old  string\x1b[0m" in said
    assert "\x1b[32m  + new  int\x1b[0m" in said
    assert "\x1b[2J" not in said
