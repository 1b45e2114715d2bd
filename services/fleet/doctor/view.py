"""Renders a diagnosis for a person: the first cause at the top, what to do first, and the symptoms that it explains."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from services.core.security.masking import mask_text
from services.core.units import format_count
from services.fleet.dead.view import plain
from services.fleet.doctor.diagnosis import Cause, Diagnosis

WIDTH = 400
SHOWN_SYMPTOMS = 8
RUNBOOKS = Path(__file__).with_name("runbooks")
"""In a clone it is a link to `docs/runbooks`; in the wheel it is a folder."""


def render_diagnosis(found: Diagnosis) -> RenderableType:
    """Causes with their evidence, then notes, then what could not be looked at."""
    parts: list[Text] = [*_head(found)]
    for number, cause in enumerate(found.causes, 1):
        parts += _cause(number, cause)
    if found.notes:
        parts.append(Text("\nnot a fault, but worth knowing:", style="bold"))
        parts += [_line(f"  {note.finding.what}{_hint(note)}") for note in found.notes]
    if found.unknown:
        parts.append(Text("\nnot looked at:", style="bold"))
        parts += [_line(f"  {text}") for text in found.unknown]
    return Group(*parts)


def _head(found: Diagnosis) -> Iterator[Text]:
    if not found.causes:
        if found.unknown:
            yield Text("Nothing wrong was found, but not everything could be looked at.", style="bold yellow")
        else:
            yield Text(f"Nothing is wrong ({format_count(found.checks, 'check')}).", style="bold green")
    elif len(found.causes) > 1:
        yield Text(f"{len(found.causes)} things are wrong. The most probable cause is the first.", style="bold red")


def _cause(number: int, cause: Cause) -> Iterator[Text]:
    finding = cause.finding
    yield Text.assemble((f"\n{number}. ", "bold red"), (_plain(finding.what), "bold"))
    for text in finding.evidence:
        yield _line(f"   evidence: {text}")
    if finding.first:
        yield Text.assemble(("   do first: ", "bold"), (_plain(finding.first), "cyan"))
    yield _line(f"   runbook:  {RUNBOOKS.resolve() / cause.runbook}.md")
    yield from _symptoms(cause.symptoms)


def _symptoms(symptoms: Sequence[Cause]) -> Iterator[Text]:
    if not symptoms:
        return
    yield _line("   it explains:")
    for one in symptoms[:SHOWN_SYMPTOMS]:
        yield _line(f"     {one.finding.what}")
    if len(symptoms) > SHOWN_SYMPTOMS:
        yield _line(f"     and {len(symptoms) - SHOWN_SYMPTOMS} more; --json has all")


def _hint(note: Cause) -> str:
    return f" ({note.finding.first})" if note.finding.first else ""


def _line(text: str) -> Text:
    return Text(_plain(text), style="")


def _plain(text: str) -> str:
    return mask_text(plain(text, WIDTH))
