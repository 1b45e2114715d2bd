"""Finds mistakes in `columns` (Spark DDL) without Spark: misspelled types, brackets without their other half, names that are
reserved or declared twice.

Spark decides what is right. So whatever this parser does not know, it leaves to Spark: only what Spark refuses is a mistake here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

TYPES = (
    *(
        "STRING",
        "INT",
        "INTEGER",
        "BIGINT",
        "LONG",
        "DOUBLE",
        "DECIMAL",
        "BOOLEAN",
        "TIMESTAMP",
        "DATE",
        "FLOAT",
        "REAL",
    ),
    *(
        "SMALLINT",
        "SHORT",
        "TINYINT",
        "BYTE",
        "BINARY",
        "ARRAY",
        "MAP",
        "STRUCT",
        "VARIANT",
        "TIMESTAMP_NTZ",
        "TIMESTAMP_LTZ",
    ),
    *("DEC", "NUMERIC", "CHAR", "CHARACTER", "VARCHAR", "TIME", "INTERVAL", "VOID", "GEOMETRY", "GEOGRAPHY"),
)
"""Spark's, the usual ones first."""
MEANT: Mapping[str, str] = {
    **dict.fromkeys(("TEXT", "STR", "UUID", "VARCHAR2", "NVARCHAR"), "STRING"),
    **dict.fromkeys(("BOOL", "BIT"), "BOOLEAN"),
    **dict.fromkeys(("INT64", "UINT32", "SERIAL"), "BIGINT"),
    **dict.fromkeys(("INT32", "INT16", "INT8"), "INT"),
    **dict.fromkeys(("FLOAT64", "FLOAT8"), "DOUBLE"),
    **dict.fromkeys(("NUMBER", "MONEY", "CURRENCY"), "DECIMAL(12,2)"),
    **dict.fromkeys(("DATETIME", "TIMESTAMPTZ"), "TIMESTAMP"),
    **dict.fromkeys(("JSON", "OBJECT"), "STRUCT<…>"),
    "LIST": "ARRAY<…>",
}
"""Types of other languages."""
MOST_DIGITS = 38
EVENT, EVENT_TIME, OURS = "event", "event_time", "_penstock"
_LOOKS_LIKE = 0.6
_ENDS = {"<": ">", "(": ")"}
_TOKEN = re.compile(
    r"\s+|--[^\n]*|/\*.*?\*/|(?P<quoted>`(?:[^`]|``)+`)|(?P<word>\w+)|(?P<sign>[<>(),:])|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")",
    re.DOTALL,
)


class _NotUnderstood(Exception):
    pass


def find_column_mistakes(ddl: str, *, timed: bool) -> list[str]:
    """Every mistake, for a person; none where that is not certain. timed: with a watermark, which adds a column.

    A bracket without its other half is the only mistake: others may come from it.
    """
    try:
        tokens = list(_split(ddl))
        if bracket := _find_bracket(tokens):
            return [bracket]
        parser = _Parser(tokens)
        parser.read_columns("")
    except _NotUnderstood:
        return []
    return [*parser.mistakes, *find_bad_names(parser.names, timed=timed)]


def find_bad_names(names: Sequence[str], *, timed: bool) -> Iterator[str]:
    """Names of outermost columns that are reserved, or declared twice. timed: as in `find_column_mistakes`."""
    lower = [name.lower() for name in names]
    for index, name in enumerate(lower):
        if name == EVENT or (timed and name == EVENT_TIME) or name.startswith(OURS):
            yield f"the column name {name!r} is reserved. Try: another name, read by a transform from `value`"
        if name in lower[:index]:
            yield f"the column {name!r} is declared twice (names are the same in upper and lower case)"


class _Parser:
    """names: of the outermost columns. mistakes: in types."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self.names: list[str] = []
        self.mistakes: list[str] = []

    def read_columns(self, path: str) -> None:
        """The columns up to the end, or the fields of a STRUCT up to its `>`."""
        while True:
            name = self._take_name()
            if not path:
                self.names.append(name)
            if self._peek() == ":":
                self._at += 1
            self._read_type(f"{path}.{name}" if path else name)
            while self._peek() not in ("", ",", ">"):  # NOT NULL, COMMENT '…', COLLATE …
                if self._peek() in ("<", "(", ")", ":"):
                    raise _NotUnderstood
                self._at += 1
            if self._peek() != ",":
                if not path and self._peek():
                    raise _NotUnderstood
                return
            self._at += 1

    def _read_type(self, path: str) -> None:
        kind = self._peek().upper()
        if kind in ("", ","):
            self.mistakes.append(f"field {path} has no type. Try: {path} STRING")
            return
        if not re.fullmatch(r"\w+", kind):
            raise _NotUnderstood
        self._at += 1
        if kind not in TYPES:
            self.mistakes.append(_unknown(path, kind))
        if self._peek() == "<" and kind in ("ARRAY", "MAP", "STRUCT"):
            self._read_parts(kind, path)
        elif self._peek() == "(":
            found = self._take_arguments()
            if kind in ("DECIMAL", "DEC", "NUMERIC") and found and found[0] > MOST_DIGITS:
                self.mistakes.append(f"field {path}: a DECIMAL has at most {MOST_DIGITS} digits, not {found[0]}")

    def _read_parts(self, kind: str, path: str) -> None:
        self._at += 1
        if kind == "STRUCT" and self._peek() != ">":
            self.read_columns(path)
        elif kind == "ARRAY":
            self._read_type(f"{path}[]")
        elif kind == "MAP":
            self._read_type(f"the key of {path}")
            self._expect(",")
            self._read_type(f"{path}[…]")
        self._expect(">")

    def _take_arguments(self) -> list[int]:
        """The numbers in brackets behind a type."""
        found = []
        while self._peek() != ")":
            self._at += 1
            if self._peek().isdigit():
                found.append(int(self._peek()))
            elif self._peek() not in (",", ")"):
                raise _NotUnderstood
        self._at += 1
        return found

    def _take_name(self) -> str:
        name = self._peek()
        if not re.fullmatch(r"\w+|`.+`", name, re.DOTALL):
            raise _NotUnderstood
        self._at += 1
        return name[1:-1].replace("``", "`") if name.startswith("`") else name

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise _NotUnderstood
        self._at += 1

    def _peek(self) -> str:
        """The next token; "" at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""


def _split(ddl: str) -> Iterator[str]:
    at = 0
    while at < len(ddl):
        found = _TOKEN.match(ddl, at)
        if found is None:
            raise _NotUnderstood
        if found.lastgroup is not None:
            yield found[0]
        at = found.end()


def _find_bracket(tokens: Sequence[str]) -> str:
    """The bracket that is missing, or the one too many; "" when the brackets match."""
    opened: list[int] = []
    for at, token in enumerate(tokens):
        if token in _ENDS:
            opened.append(at)
        elif token in _ENDS.values():
            if not opened:
                return f"one `{token}` too many: {' '.join(tokens[max(at - 2, 0) : at])}{token}"
            if _ENDS[tokens[opened[-1]]] != token:
                break
            opened.pop()
    if not opened:
        return ""
    at = opened[-1]
    before = [one for one in tokens[max(at - 2, 0) : at] if one not in ("<", ",", ":")]
    return f"a `{_ENDS[tokens[at]]}` is missing: {' '.join(before)}{tokens[at]}…"


def _unknown(path: str, kind: str) -> str:
    close = get_close_matches(kind, TYPES, n=1, cutoff=_LOOKS_LIKE)
    meant = MEANT.get(kind) or (close[0] if close else "")
    return f"field {path}: there is no type {kind}" + (
        f"; did you mean {meant}?" if meant else f". Try: {', '.join(TYPES[:9])}"
    )
