"""Renders dead letters, their causes and the audit for a person."""

import base64
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.audit import CANCEL, FREEZE, GROW, PLAN, UNFREEZE, Entry
from services.core.security.masking import mask_text
from services.core.times import format_time
from services.core.undelivered.causes import OTHER, Cause
from services.core.undelivered.dead_letter import DeadLetter
from services.core.undelivered.retry_state import MAX_DETAIL
from services.fleet.console import make_table

SHOWN_DETAIL = 80
SHOWN_PAYLOAD = 100_000
_EMPTY = {"fate": "open", "destination": "none: it failed in the transform"}
"""Shown for a value that is empty."""


def plain(text: str, limit: int | None = None) -> str:
    """The text without terminal control characters and without secrets; at most `limit` characters."""
    shown = mask_text("".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text))
    return shown if limit is None or len(shown) <= limit else f"{shown[: limit - 1]}…"


def letter_table(letters: Iterable[DeadLetter], *, settled: bool) -> Table:
    """One row per dead letter. settled: with a column for the fate."""
    columns = ("position", "id", "pipe", "destination", "reason", "attempts", "dead since", "detail")
    table = make_table(*columns, *(["fate"] if settled else []), right=["attempts"], text=["detail"])
    for letter in letters:
        fate = [Text(letter.fate or "open", style="dim" if letter.fate else "yellow")] if settled else []
        names = (str(letter.position), letter.event_id or "", letter.pipe, letter.destination)
        named = [Text(plain(text)) for text in names]
        table.add_row(
            *named,
            Text(plain(letter.reason, 40), style="red"),
            str(letter.attempts),
            format_time(letter.dead_since),
            Text(plain(letter.detail, SHOWN_DETAIL)),
            *fate,
        )
    return table


def letter_page(letter: DeadLetter, *, from_source: bool) -> RenderableType:
    """Everything about one dead letter: penstock headers, other headers, payload. from_source: the payload is from its source."""
    shown = {
        name: value if value not in ("", None) else _EMPTY.get(name, "none") for name, value in letter.as_json().items()
    }
    lines = [Text.assemble((f"{name:<15}", "bold"), plain(str(value))) for name, value in shown.items()]
    lines.append(Text("headers", style="bold"))
    lines += [Text(f"  {plain(name)}: {plain(_text(value))}") for name, value in letter.record.headers]
    payload = letter.record.value
    size = "none, and the event is gone from its source" if payload is None else f"{len(payload)} bytes"
    size += ", read from its source" if from_source else ""
    lines.append(Text.assemble(("payload ", "bold"), f"({size})"))
    return Group(*lines, Text("\n".join(map(plain, _text(payload or b"").splitlines()))[:SHOWN_PAYLOAD]))


def letter_json(letter: DeadLetter, *, from_source: bool) -> dict[str, object]:
    """Everything about one dead letter. Values that are not UTF-8 are in base64, under a name that ends in `_base64`.

    payload_from: `letter`, `source`, or null when neither has it.
    """
    headers = [{"name": name, **_value("value", value)} for name, value in letter.record.headers]
    found = None if letter.record.value is None else "source" if from_source else "letter"
    return {**letter.as_json(), "headers": headers, **_value("payload", letter.record.value), "payload_from": found}


def cause_table(causes: Iterable[Cause]) -> Table:
    """One row per cause. The detail is that of its example, the newest dead letter. The times: when its first and last event
    became dead letters."""
    columns = ("count", "reason", "example", "newest detail", "first dead", "last dead")
    table = make_table(*columns, right=["count"], text=["newest detail"])
    for cause in causes:
        table.add_row(
            str(cause.count),
            Text(plain(cause.reason, 40), style="red"),
            Text(plain(str(cause.example.position))),
            Text(plain(cause.detail if cause.reason == OTHER else cause.example.detail, MAX_DETAIL)),
            format_time(cause.first),
            format_time(cause.last),
        )
    return table


def audit_line(entry: Entry) -> Text:
    """One entry: when, who, what."""
    ranges = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in entry.ranges)
    asked = " ".join(f"{name}={value}" for name, value in entry.filters.items())
    where = (
        entry.topic
        if entry.action in (GROW, PLAN, CANCEL, FREEZE, UNFREEZE)
        else f"{entry.topic}:{entry.partition} {ranges}"
    )
    return Text(
        plain(f"{format_time(entry.at)}  {entry.who}  {entry.action:<8} {entry.count:>6}  {where}  {asked}".rstrip())
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _value(name: str, value: bytes | None) -> dict[str, object]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
