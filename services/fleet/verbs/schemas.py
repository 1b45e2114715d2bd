"""`penstock schemas`: registers, checks, compares and shows Avro schemas. Status 1: a schema would break a reader."""

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import aiohttp
import typer
import uvloop
from rich.table import Table
from rich.text import Text

from services.core.avro.compatibility import Level
from services.core.avro.json_document import SchemaError
from services.core.avro.parsing import parse_schema
from services.core.units import format_count
from services.fleet.access import ingest_url, require_fleet
from services.fleet.console import OUT, make_table, print_note
from services.fleet.dead.view import plain
from services.fleet.problem import CommandFailed, unreadable_file, why_no_answer
from services.fleet.verbs.app import APP, AsJson, Data, example
from services.fleet.verbs.send import KeyFile, read_api_key

SCHEMAS = typer.Typer(help="Avro schemas of streams, in the registry: register, check, compare.", no_args_is_help=True)
APP.add_typer(SCHEMAS, name="schemas")

INCOMPATIBLE = 1
_TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_WRONG_INPUT = frozenset({400, 404, 413, 415, 422})
_IMPORT = re.compile(r'^\s*import\s+(?:idl|protocol|schema)\s+"([^"]+)"\s*;', re.MULTILINE)
_PROTOCOLS = {".avpr": "avpr", ".avdl": "avdl"}

RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="PENSTOCK_REGISTRY",
        help="The registry's URL. Default: that of the fleet on --data.",
    ),
]
SubjectName = Annotated[
    str | None,
    typer.Option(
        "--subject", help="The subject, e.g. clicks-value for the stream clicks. Default: the type's full name."
    ),
]
SchemaFile = Annotated[Path, typer.Argument(help="A schema (.avsc) or a whole protocol (.avpr, .avdl).")]


@dataclass(frozen=True, slots=True)
class Registry:
    url: str
    key: str | None = field(default=None, repr=False)


@SCHEMAS.command(
    epilog=example(
        "penstock schemas push click.avsc --subject clicks-value\n"
        "penstock schemas push shop.avdl --registry http://registry:8084 --key-file registry.key"
    )
)
def push(
    file: SchemaFile,
    subject: SubjectName = None,
    registry: RegistryUrl = None,
    key_file: KeyFile = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Register a schema, or all types of a protocol: all or nothing. A schema that is there already stays as it is.

    Status 0 when it is registered, 1 when it is incompatible, 2 when the file is wrong.
    """
    target, text = _target(registry, key_file, data), _read(file)
    language = _PROTOCOLS.get(file.suffix)
    if language is not None:
        body = _protocol(file, text)
        status, answer = uvloop.run(ask(target, "POST", "/v1/protocols", body, accept=[409]))
    else:
        body = {"schema": text, "subject": subject or _full_name(file, text)}
        status, answer = uvloop.run(ask(target, "POST", "/v1/schemas", body, accept=[409]))
    if status == 409:
        _refuse(answer, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if language is not None:
        for one in answer["types"]:
            OUT.print(Text(f"{one['subject']} version {one['version']}, id {one['id']}"))
        return
    was = (", a new subject" if answer["version"] == 1 else "") if answer["new"] else ", was there already"
    OUT.print(Text(f"{answer['subject']} version {answer['version']}, id {answer['id']}{was}"))
    print_note(f"fingerprint {answer['fingerprint']}", "dim")


@SCHEMAS.command(
    epilog=example("penstock schemas check click.avsc --subject clicks-value\npenstock schemas check click.avsc --json")
)
def check(
    file: SchemaFile,
    subject: SubjectName = None,
    registry: RegistryUrl = None,
    key_file: KeyFile = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Check whether a schema or protocol could be registered; nothing is stored. For CI, before a producer is deployed.

    Status 0 when it could, 1 when it is incompatible, 2 when the file is wrong.
    """
    target, text = _target(registry, key_file, data), _read(file)
    if file.suffix in _PROTOCOLS:
        body = {**_protocol(file, text), "check": True}
        status, answer = uvloop.run(ask(target, "POST", "/v1/protocols", body, accept=[409]))
    else:
        body = {"schema": text, "subject": subject or _full_name(file, text)}
        status, answer = uvloop.run(ask(target, "POST", "/v1/check", body))
    if status == 409 or not answer["compatible"]:
        _refuse(answer, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(answer))
    elif file.suffix in _PROTOCOLS:
        print_note(f"{answer['protocol']}: compatible, {format_count(len(answer['subjects']), 'type')}", "green")
    else:
        print_note(f"{answer['subject']}: compatible, level {answer['level']}", "green")


@SCHEMAS.command(
    epilog=example(
        "penstock schemas diff old.avsc new.avsc\npenstock schemas diff clicks-value@1 new.avsc --level FULL"
    )
)
def diff(
    old: Annotated[str, typer.Argument(help="A file, or SUBJECT@VERSION, or SUBJECT@latest.")],
    new: Annotated[str, typer.Argument(help="As OLD.")],
    level: Annotated[str, typer.Option("--level", help="BACKWARD, FORWARD or FULL: what must not break.")] = "BACKWARD",
    registry: RegistryUrl = None,
    key_file: KeyFile = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show the differences of two schemas, and changes that make them compatible.

    Status 0 when the level allows the change, 1 when it does not, 2 when a file is wrong.
    """
    if level.upper() not in (Level.BACKWARD, Level.FORWARD, Level.FULL):
        raise CommandFailed(f"diff cannot check the level {level}", "--level BACKWARD, FORWARD or FULL", status=2)
    body = {"from": _side(old), "to": _side(new), "level": level.upper()}
    target = _target(registry, key_file, data)
    _, answer = uvloop.run(ask(target, "POST", "/v1/diff", body))
    allowed = answer["levels"][level.upper()]
    if as_json:
        typer.echo(json.dumps({**answer, "compatible": allowed}))
    else:
        print_differences(answer["differences"])
        if not allowed:
            _print_together(answer, f"{level.upper()} compatible")
        same = (
            "the schemas are the same"
            if answer["same"]
            else f"{level.upper()}: {'allowed' if allowed else 'not allowed'}"
        )
        print_note(same, "green" if allowed else "red")
    if not allowed:
        raise typer.Exit(INCOMPATIBLE)


@SCHEMAS.command("list", epilog=example("penstock schemas list\npenstock schemas list --json"))
def list_subjects(
    registry: RegistryUrl = None, key_file: KeyFile = None, data: Data = Path("data"), as_json: AsJson = False
) -> None:
    """List the subjects with their latest version, and the streams and pipes that use them."""
    _, answer = uvloop.run(ask(_target(registry, key_file, data), "GET", "/v1/subjects"))
    if as_json:
        typer.echo(json.dumps(answer))
        return
    OUT.print(subject_table(answer["subjects"]))
    print_note(f"{format_count(len(answer['subjects']), 'subject')}; the default level is {answer['level']}", "dim")


@SCHEMAS.command(
    epilog=example("penstock schemas show clicks-value\npenstock schemas show clicks-value@2 > click.avsc")
)
def show(
    subject: Annotated[
        str, typer.Argument(help="SUBJECT: its versions. SUBJECT@VERSION or SUBJECT@latest: the schema.")
    ],
    registry: RegistryUrl = None,
    key_file: KeyFile = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """List the versions of a subject, or print the schema of one."""
    name, _, version = subject.partition("@")
    _, answer = uvloop.run(ask(_target(registry, key_file, data), "GET", f"/v1/subjects/{quote(name, safe='')}"))
    if version:
        one = _find_version(answer, version)
        typer.echo(json.dumps(one) if as_json else json.dumps(json.loads(one["schema"]), indent=2, ensure_ascii=False))
        return
    if as_json:
        typer.echo(json.dumps(answer))
        return
    OUT.print(version_table(answer["versions"]))
    print_note(f"level {answer['level']}, mode {answer['mode']}", "dim")


def subject_table(subjects: Sequence[dict[str, Any]]) -> Table:
    """The subjects of `GET /v1/subjects`."""
    columns = ("subject", "version", "id", "type", "level", "streams", "pipes")
    table = make_table(*columns, right=["version", "id"], text=["streams", "pipes"])
    for one in subjects:
        latest = one["latest"]
        level = one["level"] + ("" if one["own_level"] else " (default)")
        cells = (one["subject"], str(latest["version"]), str(latest["id"]), latest["name"], level)
        table.add_row(*cells, ", ".join(one["streams"]), ", ".join(one["pipes"]))
    return table


def version_table(versions: Sequence[dict[str, Any]]) -> Table:
    """The versions of `GET /v1/subjects/{subject}`."""
    columns = ("version", "id", "fingerprint", "type", "registered", "by", "deprecated")
    table = make_table(*columns, right=["version", "id"], text=["deprecated"], below=["fingerprint"])
    for one in versions:
        note = Text(plain(one["note"] or "yes") if one["deprecated"] else "", style="yellow")
        cells = (str(one["version"]), str(one["id"]), one["fingerprint"], one["name"], one["registered"], one["by"])
        table.add_row(*cells, note)
    return table


def print_differences(differences: Sequence[dict[str, Any]]) -> None:
    """Each with its place, rule, reason, both sides and fix; in colours on a terminal. If only FORWARD breaks, the old reads."""
    for one in differences:
        version = one.get("version")
        against = "" if version is None else f" against version {version}"
        subject = f"{one['subject']} " if "subject" in one else ""
        breaks = f" breaks {one['breaks']}" if one["breaks"] else " breaks nothing"
        style = "bold red" if one["breaks"] else "bold"
        OUT.print(
            Text.assemble(subject, (one["path"] or "/", style), f"{against}  ", (one["rule"], "cyan"), (breaks, "dim"))
        )
        OUT.print(Text(f"  {plain(one['message'])}"))
        sides = one["writer"], one["reader"]
        old, new = sides[::-1] if one["breaks"] == "FORWARD" else sides
        for what, side, colour in (("- old", old, "red"), ("+ new", new, "green")):
            if side is not None:
                OUT.print(
                    Text(f"  {what}  {side if isinstance(side, str) and side else json.dumps(side)}", style=colour)
                )
        for step in one["fix"] or []:
            OUT.print(Text.assemble(("  fix    ", "bold"), json.dumps(step)))


def _refuse(answer: dict[str, Any], *, as_json: bool) -> None:
    """Show why a schema is incompatible, and end. Raises typer.Exit."""
    if as_json:
        typer.echo(json.dumps({"compatible": False, **answer}))
    else:
        print_differences(answer["differences"])
        print_note(f"incompatible: {format_count(len(answer['differences']), 'difference')}", "red")
        _print_together(answer, "compatible")
    raise typer.Exit(INCOMPATIBLE)


def _print_together(answer: dict[str, Any], makes: str) -> None:
    """The patch that ends several differences. That of an only one stands beside it. `repairs`: of a protocol, by subject."""
    repairs = {subject: one["patch"] for subject, one in answer.get("repairs", {}).items()}
    repairs.setdefault("", answer.get("repair"))
    for subject in dict.fromkeys(one.get("subject", "") for one in answer["differences"] if one["breaks"]):
        patch, of = repairs.get(subject), f" of {plain(subject)}" if subject else ""
        if any(one["fix"] for one in answer["differences"] if one.get("subject", "") == subject):
            continue
        if not patch:
            print_note(f"No change{of} was found that makes it {makes}.", "yellow")
            continue
        print_note(f"These changes{of} together make it {makes}:", "green")
        for step in patch:
            OUT.print(Text(f"  {json.dumps(step)}"))


def _target(url: str | None, key_file: Path | None, data: Path) -> Registry:
    """The registry as given, or that of the fleet on the data folder. Blocking. Raises CommandFailed."""
    key = read_api_key(key_file, os.environ)
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise CommandFailed(
                "--registry needs the address of a registry", "--registry http://127.0.0.1:8084", status=2
            )
        return Registry(url.rstrip("/"), key)
    state = require_fleet(data, "--registry with the address of a registry")
    if not state.registry:
        raise CommandFailed(
            f"the fleet on {data} runs no registry", "penstock up --registry 127.0.0.1:8084, or --registry here"
        )
    return Registry(ingest_url(state.registry), key)


async def ask(
    registry: Registry,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    accept: Collection[int] = (),
) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of the answer. accept: refusals that are returned.

    Raises CommandFailed with the registry's own message for any other refusal; status 2 where the input is wrong.
    """
    head = {} if registry.key is None else {"Authorization": f"Bearer {registry.key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, headers=head) as session,
            session.request(method, registry.url + path, json=body, allow_redirects=False) as answer,
        ):
            found: dict[str, Any] = json.loads(await answer.read())  # orjson rounds integers of more than 64 bits
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CommandFailed(
            f"the registry at {registry.url} does not answer: {why_no_answer(error)}", "penstock status"
        ) from error
    if answer.status in (200, 201) or answer.status in accept:
        return answer.status, found
    if str(found.get("type", "")).endswith(":subject-not-found"):
        raise CommandFailed("there is no such subject", "penstock schemas list", status=2)
    text = ". ".join(str(found[key]) for key in ("title", "detail") if found.get(key))
    remedy = "--key-file with an API key, or PENSTOCK_KEY" if answer.status == 401 else ""
    raise CommandFailed(text, remedy, status=2 if answer.status in _WRONG_INPUT else 1)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{file} is not UTF-8", "a text file", status=2) from error
    except OSError as error:
        raise unreadable_file(file, error) from error


def _protocol(file: Path, text: str) -> dict[str, object]:
    return {"text": text, "language": _PROTOCOLS[file.suffix], "imports": _read_imports(file)}


def _read_imports(file: Path) -> dict[str, str]:
    """The files that a file imports, and that those import, by their paths from its folder."""
    found: dict[str, str] = {}
    rest = [file] if file.suffix == ".avdl" else []
    while rest:
        one = rest.pop()
        for named in _IMPORT.findall(_read(one)):
            path = one.parent / named
            location = os.path.relpath(path, file.parent)
            if location not in found:
                found[location] = _read(path)
                rest += [path] if path.suffix == ".avdl" else []
    return found


def _full_name(file: Path, text: str) -> str:
    try:
        return parse_schema(text).full_name
    except SchemaError as error:
        raise CommandFailed(f"{file}: {error}", "--subject, if the schema has references", status=2) from error


def _side(text: str) -> dict[str, Any]:
    name, at, version = text.rpartition("@")
    if at and not Path(text).exists():
        return {"subject": name, "version": int(version) if version.isdigit() else version}
    return {"schema": _read(Path(text))}


def _find_version(answer: dict[str, Any], version: str) -> dict[str, Any]:
    latest: dict[str, Any] = answer["latest"]
    if version == "latest":
        return latest
    found = [one for one in answer["versions"] if str(one["version"]) == version]
    if not found:
        raise CommandFailed(
            f"{answer['subject']} has no version {version}", f"1 to {len(answer['versions'])}", status=2
        )
    return dict(found[0])
