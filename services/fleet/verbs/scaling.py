"""`penstock scaling`: freeze the size of a group of instances, unfreeze it, and show the autoscaler's last decisions."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table
from rich.text import Text

from services.core.audit import FREEZE, UNFREEZE, write_act
from services.core.broker.producer import Producer
from services.core.control.freezes import ON_PLATFORM, Freeze, Freezes, write_freeze
from services.core.times import format_time
from services.core.units import parse_duration
from services.fleet.access import find_broker, opened
from services.fleet.console import ERR, OUT, make_table, print_note
from services.fleet.dead.audit import Auditor, whoami
from services.fleet.dead.view import plain
from services.fleet.observer_client import find_observer, get_json
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, ObserverAddress, ObserverToken, example
from services.fleet.verbs.destination import MAX_REASON

SCALING = typer.Typer(
    help="Freeze the size of a group of instances, and show what the autoscaler decided.", no_args_is_help=True
)
APP.add_typer(SCALING, name="scaling")

OBSERVER_WITHIN_S = 5.0
MAX_FREEZE_S = 366 * 86_400.0
Group = Annotated[str, typer.Argument(help="The group, e.g. expel; on AWS and Kubernetes the platform's name of it.")]


@SCALING.command(
    epilog=example(
        'penstock scaling freeze expel --why "we measure the receiver"\n'
        'penstock scaling freeze expel --why "load test" --for 2h'
    )
)
def freeze(
    group: Group,
    why: Annotated[str, typer.Option("--why", help="The reason, shown to other operators.")],
    duration: Annotated[str | None, typer.Option("--for", help="How long, e.g. 2h. Default: until unfreeze.")] = None,
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Keep the size of a group. The autoscaler still decides, and shows its decisions, but orders nothing.

    A freeze takes effect before the next decision. The platform still replaces an instance that ends. The command needs the
    broker, and no running fleet.
    """
    if not why.strip():
        raise CommandFailed("--why is empty", '--why "the reason for other operators"', status=2)
    now = time.time_ns() // 1_000_000
    until = None if duration is None else now + _millis(duration)
    new = Freeze("frozen", whoami(), now, why.strip()[:MAX_REASON], until)
    _change(group, new, observer, token_file, find_broker(broker, data), data, as_json=as_json)


@SCALING.command(epilog=example("penstock scaling unfreeze expel"))
def unfreeze(
    group: Group,
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Let the autoscaler change the size of a group again."""
    new = Freeze("unfrozen", whoami(), time.time_ns() // 1_000_000)
    _change(group, new, observer, token_file, find_broker(broker, data), data, as_json=as_json)


@SCALING.command(epilog=example("penstock scaling show\npenstock scaling show --json"))
def show(
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show each group: its size, the autoscaler's last decision, who froze it, failed instances, a hot partition."""
    known = uvloop.run(_read_known(observer, token_file, find_broker(broker, data), data))
    if as_json:
        groups = [_group_json(name, known) for name in known.names]
        typer.echo(json.dumps({"groups": groups, "problem": known.problem}))
        return
    if known.names:
        OUT.print(group_table(known))
    if known.problem is not None:
        print_note(f"The decisions are not known: {known.problem}", "yellow")
    elif not known.reports:
        print_note("The autoscaler has reported no decision to the observer. Try: penstock up --autoscale true")


@dataclass(frozen=True, slots=True)
class Known:
    """reports: from the observer, by group. freezes: those in force. problem: why the observer did not answer."""

    reports: Mapping[str, dict[str, Any]]
    freezes: Mapping[str, Freeze]
    problem: str | None

    @property
    def names(self) -> Sequence[str]:
        return sorted(self.reports.keys() | self.freezes.keys())

    def on_platform(self, group: str) -> str | None:
        """The freeze by an annotation or a tag, as last reported."""
        frozen = self.reports.get(group, {}).get("frozen")
        return str(frozen) if frozen is not None and str(frozen).startswith(ON_PLATFORM) else None


def group_table(known: Known) -> Table:
    table = make_table(
        "group",
        "working",
        "wanted",
        "decision",
        "notes",
        "at",
        right=["working", "wanted"],
        text=["decision", "notes"],
    )
    for name in known.names:
        table.add_row(*_row(name, known))
    return table


def _change(
    group: str, new: Freeze, observer: str | None, token_file: Path | None, url: str, data: Path, *, as_json: bool
) -> None:
    known, changed = uvloop.run(_write(group, new, observer, token_file, url, data))
    if as_json:
        typer.echo(json.dumps(_group_json(group, known)))
        return
    found = known.freezes.get(group)
    state = "unfrozen" if found is None else "frozen"
    words = Text.assemble(
        f"{group} is {'' if changed else 'already '}", (state, "green" if found is None else "yellow")
    )
    if found is not None:
        words.append(plain(found.text.removeprefix("frozen"), 700))
    ERR.print(words)
    if (there := known.on_platform(group)) is not None:
        print_note(
            plain(f"As last reported, {group} is {there}. To end that freeze, remove the annotation or tag there", 700),
            "yellow",
        )
    if known.problem is not None and found is not None:
        print_note(f"Whether there is a group {plain(group, 63)} was not checked: {known.problem}", "yellow")


async def _write(
    group: str, new: Freeze, observer: str | None, token_file: Path | None, url: str, data: Path
) -> tuple[Known, bool]:
    """Write the change unless it is in force already: an unfrozen group, or the same reason without another end."""
    reports, problem = await _ask_observer(observer, token_file, data)
    async with opened(url) as broker, Producer(broker.appender) as producer:
        freezes = Freezes(broker.reader)
        await freezes.refresh()
        known = Known(reports, freezes.in_force(new.at), problem)
        if new.state == "frozen" and reports and group not in reports and group not in known.freezes:
            raise CommandFailed(
                f"the autoscaler has no group {plain(group, 63)}", f"one of: {', '.join(sorted(reports))}", status=2
            )
        if new.state == "unfrozen" and group not in known.names and (reports or known.freezes):
            raise CommandFailed(f"no group {plain(group, 63)} is frozen", f"one of: {', '.join(known.names)}", status=2)
        before = known.freezes.get(group)
        changed = before is not None if new.state == "unfrozen" else before is None or _differs(before, new)
        if changed:
            await Auditor(producer, new.by, {}).require_topic()
            await write_freeze(producer, group, new)
            shown = {"group": group, "why": new.reason, "until": "" if new.until is None else format_time(new.until)}
            action = FREEZE if new.state == "frozen" else UNFREEZE
            await write_act(producer, action, new.by, {name: text for name, text in shown.items() if text})
            await freezes.refresh()
        return Known(reports, freezes.in_force(new.at), problem), changed


def _differs(before: Freeze, new: Freeze) -> bool:
    return (before.reason, before.until) != (new.reason, new.until)


async def _read_known(observer: str | None, token_file: Path | None, url: str, data: Path) -> Known:
    reports, problem = await _ask_observer(observer, token_file, data)
    async with opened(url) as broker:
        freezes = Freezes(broker.reader)
        await freezes.refresh()
        return Known(reports, freezes.in_force(time.time_ns() // 1_000_000), problem)


async def _ask_observer(
    observer: str | None, token_file: Path | None, data: Path
) -> tuple[Mapping[str, dict[str, Any]], str | None]:
    """The reports by group, and why there are none. A freeze must not wait for an observer that is away."""
    try:
        async with asyncio.timeout(OBSERVER_WITHIN_S):
            found = await asyncio.to_thread(find_observer, observer, data, token_file)
            body = await get_json(found, "/v1/scaling", {})
    except CommandFailed as error:
        return {}, str(error)
    except TimeoutError:
        return {}, f"the observer does not answer within {OBSERVER_WITHIN_S:.0f} s"
    return {one["group"]: one for one in body["groups"]}, None


def _group_json(name: str, known: Known) -> dict[str, Any]:
    found = known.freezes.get(name)
    frozen = None
    if found is not None:
        until = None if found.until is None else format_time(found.until)
        frozen = {"by": found.by, "since": format_time(found.at), "until": until, "why": found.reason}
    return {"group": name, "frozen": frozen, "report": known.reports.get(name)}


def _row(name: str, known: Known) -> list[Text]:
    one, found = known.reports.get(name), known.freezes.get(name)
    frozen = found.text if found is not None else one["frozen"] if one is not None else None
    if one is None:
        return [Text(plain(text, 700)) for text in (name, "", "", "none was reported", f"{frozen}", "")]
    found_notes = (("", frozen), *(("failed: ", text) for text in one["failed"]), ("hot: ", one["hot"]))
    notes = [f"{kind}{text}" for kind, text in found_notes if text and text not in one["words"]]  # once is enough
    dry_run = "dry run: " if one["dry_run"] else ""
    texts = (f"{one['working']} of {one['size']}", str(one["wanted"]), f"{dry_run}{one['action']}: {one['words']}")
    style = "yellow" if frozen is not None else "red" if one["failed"] else ""
    return [
        Text(plain(name, 63)),
        *(Text(plain(text, 700)) for text in texts),
        Text(plain("; ".join(notes), 2000), style=style),
        Text(one["at"]),
    ]


def _millis(duration: str) -> int:
    try:
        seconds = parse_duration(duration)
    except ValueError as error:
        raise CommandFailed(f"--for: {error}", "--for 2h", status=2) from error
    if not 1 <= seconds <= MAX_FREEZE_S:
        raise CommandFailed("--for is from 1s to 366d", "--for 2h, or without it: until unfreeze", status=2)
    return round(seconds * 1000)
