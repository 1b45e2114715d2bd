"""The text of Avro IDL below its grammar: documentation comments, strings, numbers, and the words of a mistake."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

import lark

from services.core.avro.json_document import Json, SchemaError, place_of

_GRAMMAR = Path(__file__).with_name("idl.lark")
MAX_TOKENS: Final = 100_000
"""The most words and signs of one text. The parser takes some ten microseconds for each."""
MAX_NESTING: Final = 100
"""How deep brackets may be nested, of all kinds together."""
_PIECE = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|(?P<doc>/\*\*(?!/)[^*]*\*+(?:[^*/][^*]*\*+)*/)|(?P<skip>/\*[^*]*\*+(?:[^*/][^*]*\*+)*/|//[^\n\r]*|\s+)'
    r"|(?P<end>\x1a)|[\w.`-]+|(?P<open>[<{\[(])|(?P<close>[>}\])])|."
)
_LINE_END = re.compile("\r\n|[\n\x0b\x0c\r\x85\u2028\u2029]")
_INDENT = re.compile("[ \t\xa0\u1680\u180e\u2000-\u200a\u202f\u205f\u3000]*")
_ESCAPE = re.compile(r"\\(?:u+([0-9a-fA-F]{4})|([0-3]?[0-7]?[0-7])|(.))")
_ESCAPED: Final = {"n": "\n", "r": "\r", "b": "\b", "f": "\f", "t": "\t"}


_TOO_LARGE: Final = (
    f"There are more than {MAX_TOKENS:,} words and signs, or {MAX_NESTING} levels of brackets. Try: several files."
)


class Documentation:
    """The documentation comments of a text. A comment belongs to what begins directly behind it.

    Raises SchemaError for a text that is too long or too deep for the parser.
    """

    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._by_start: dict[int, str] = {}
        self._places: dict[int, int] = {}  # of each comment, by the start of what is behind it
        self._lost: list[int] = []
        waiting: re.Match[str] | None = None
        tokens = depth = 0
        for piece in _PIECE.finditer(text):
            if piece["end"]:
                break
            if piece["skip"]:
                continue
            if waiting is not None and piece["doc"]:
                self._lost.append(waiting.start())
            elif waiting is not None:
                self._by_start[piece.start()] = waiting[0]
                self._places[piece.start()] = waiting.start()
            waiting = piece if piece["doc"] else None
            tokens += 1
            depth += (piece["open"] is not None) - (piece["close"] is not None)
            if tokens > MAX_TOKENS or depth > MAX_NESTING:
                raise SchemaError("", _TOO_LARGE, *place_of(text, piece.start()), file)
        if waiting is not None:
            self._lost.append(waiting.start())

    def comment_at(self, start: int) -> str | None:
        """The comment of what begins at an offset, without its stars."""
        comment = self._by_start.get(start)
        self._places.pop(start, None)
        return None if comment is None else strip_comment(comment)

    def warnings(self) -> list[str]:
        """A sentence for each comment that belongs to nothing."""
        warnings = []
        for start in sorted([*self._lost, *self._places.values()]):
            line, column = place_of(self._text, start)
            warnings.append(
                f"line {line}, column {column}: this documentation comment belongs to no definition. Try: /* … */"
            )
        return warnings


def strip_comment(comment: str) -> str:
    """The text of `/** … */` without the indentation and the stars that all its lines have."""
    text = comment[3:-2].strip("".join(map(chr, range(33))))
    lines = _LINE_END.split(text)
    ends = _LINE_END.findall(text)
    for stars in ("**", "*"):
        if all(
            line[cast("re.Match[str]", _INDENT.match(line)).end() :].startswith(stars) for line in lines[1:]
        ) and lines[0].startswith(stars):
            return _join([_without_stars(line, stars) for line in lines], ends)
    if len(lines) > 1:
        indent = cast("re.Match[str]", _INDENT.match(lines[1]))[0]
        while not all(line.startswith(indent) for line in lines[1:]):
            indent = indent[:-1]
        lines[1:] = [line[len(indent) :] for line in lines[1:]]
    return _join(lines, ends)


def _without_stars(line: str, stars: str) -> str:
    rest = line[cast("re.Match[str]", _INDENT.match(line)).end() :].removeprefix(stars)
    return rest[1:] if rest and _INDENT.fullmatch(rest[0]) and rest[0] != "" else rest


def _join(lines: list[str], ends: list[str]) -> str:
    return "".join(line + end for line, end in zip(lines, [*ends, ""], strict=True))


def string_of(token: str) -> str:
    """A string literal without its quotes and escapes."""
    text = _ESCAPE.sub(_unescaped, token[1:-1])
    # Two escapes may be one character beyond the first 65,536.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _unescaped(match: re.Match[str]) -> str:
    code, octal, letter = match.groups()
    if code is not None:
        return chr(int(code, 16))
    return chr(int(octal, 8)) if octal is not None else _ESCAPED.get(letter, letter)


def integer_of(token: str) -> int:
    """An integer literal: decimal, 0x hexadecimal, 0 octal, with or without l. Raises ValueError beyond 64 bits."""
    text = token.rstrip("lL")
    if len(text) > 30:
        raise ValueError(text[:30])
    digits = text.lstrip("-")
    base = 16 if digits[:2].lower() == "0x" else 8 if digits[0] == "0" else 10
    value = int(digits, base) * (-1 if text[0] == "-" else 1)
    if not -(2**63) <= value < 2**63:
        raise ValueError(text)
    return value


def float_of(token: str) -> Json:
    """A floating literal; NaN and the infinities as the strings that Avro writes."""
    text = token.lower()
    if "x" in text:
        try:
            value = float.fromhex(text.rstrip("fd") if "p" in text else text)
        except OverflowError:
            value = -math.inf if text.startswith("-") else math.inf
    else:
        value = float(text if text.endswith(("nan", "infinity")) else text.rstrip("fd"))
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("-Infinity" if value < 0 else "Infinity")


@lru_cache(maxsize=1)
def _parser() -> lark.Lark:
    return lark.Lark(
        _GRAMMAR.read_text(encoding="utf-8"),
        parser="lalr",
        propagate_positions=True,
        maybe_placeholders=False,
    )


def tree_of(text: str, file: str) -> lark.Tree[lark.Token]:
    """The syntax tree of a text. Raises SchemaError with line and column."""
    try:
        return _parser().parse(text)
    except lark.UnexpectedToken as error:
        what = "the end of the text" if error.token.type == "$END" else repr(str(error.token)[:40])
        line, column = place_of(text, len(text)) if error.token.type == "$END" else (error.line, error.column)
        raise SchemaError(
            "", f"Unexpected {what}. Expected: {_expected(error.accepts or error.expected)}.", line, column, file
        ) from None
    except lark.UnexpectedCharacters as error:
        raise SchemaError(
            "",
            f"Unexpected {error.char!r}. Expected: {_expected(error.allowed or set())}.",
            error.line,
            error.column,
            file,
        ) from None


def _expected(names: set[str]) -> str:
    """Terminals as a person writes them, at most eight."""
    words = {terminal.name: terminal.pattern for terminal in _parser().terminals}
    shown = sorted(
        repr(str(words[name].value))
        if name in words and words[name].type == "str"
        else name.lower().replace("$end", "the end")
        for name in names
    )
    return ", ".join(shown[:8]) + (" or others" if len(shown) > 8 else "")
