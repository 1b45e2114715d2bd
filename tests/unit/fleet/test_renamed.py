"""A changed pipe file against a fleet that ran: new names take over, and nothing is sent again or left behind without a word."""

import asyncio
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import AsyncMock

import msgspec
import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.log import broker as log_broker
from services.core.broker.log.admin import LogAdmin
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.control.pauses import OPERATOR, Pause, Pauses, write_pause
from services.core.control.transform_marks import write_transform_mark
from services.core.pipe_file.pipes import load_pipes, pipe_version
from services.core.pipe_file.state_plan import StateCheck, StatePlan, text_digest
from services.core.pipe_file.topic_names import renames_of
from services.core.undelivered.retry_state import unwrap
from services.core.yaml_source import BadConfiguration, Problem
from services.fleet.pipes.changes import find_changes
from services.fleet.pipes.topics import check_changes, prepare
from services.fleet.problem import CommandFailed
from tests.support.dead_letters import dead_letter
from tests.support.waiting_events import stored, waiting_event
from tests.unit.fleet.conftest import Shell, at_broker, commit, put

HOOK = "webhook: {url: 'https://example.org/'}"


def one_pipe(pipe: str, destinations: Sequence[str], *, more: str = "", rest: str = "") -> str:
    """destinations: each the text of its keys but the webhook. more: keys of the pipe. rest: of the file."""
    those = ", ".join(f"{{{keys}, {HOOK}}}" for keys in destinations)
    return f"streams: {{s: {{}}}}\npipes:\n  {pipe}: {{sources: [s], {more}destinations: [{those}]}}\n{rest}"


class Site:
    """A pipe file, and the broker of a fleet that ran with it."""

    def __init__(self, folder: Path, shell: Shell) -> None:
        self.url, self.path, self._shell = f"log://{folder}/data/log", folder / "pipes.yaml", shell

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def start(self) -> None:
        """As `penstock up` before any service runs."""
        asyncio.run(prepare(self.url, load_pipes(self.path), self.path))

    def put(self, topic: str, records: Sequence[Record]) -> None:
        put(self.url, topic, records)

    def send(self, count: int) -> None:
        """Events into the stream."""
        self.put("s", [waiting_event("any/one", number) for number in range(count)])

    def deliver(self, lane: str, up_to: int) -> None:
        """As a lane that was stopped when it had delivered its stream up to there."""
        commit(self.url, lane.replace("/", "."), "s", up_to)

    def position(self, lane: str) -> int | None:
        return at_broker(self.url, lambda broker: broker.admin.committed(lane.replace("/", "."), "s")).get(0)

    def records(self, topic: str) -> list[Record]:
        return at_broker(self.url, lambda broker: stored(broker, topic))

    def check(self, *flags: str) -> tuple[int, str]:
        """The status, and all lines but the first."""
        status = self._shell.run("check", *flags)
        return status, self._shell.err.replace("\n", " ")

    def changes(self) -> list[dict[str, object]]:
        assert self._shell.run("check", "--json") == 0
        found: list[dict[str, object]] = json.loads(self._shell.out)["changes"]
        return found


@pytest.fixture
def site(tmp_path: Path, shell: Shell) -> Site:
    """`late/old` has delivered 2,800 events: all that there are."""
    site = Site(tmp_path, shell)
    site.write(one_pipe("late", ["name: old"]))
    site.start()
    site.send(2800)
    site.deliver("late/old", 2799)
    return site


def letter(pipe: str, destination: str, number: int) -> Record:
    record, _ = unwrap(waiting_event("any/one", number))
    return dead_letter(record, number, pipe=pipe, destination=destination, source=TopicPartition("s", 0))


def test_a_new_name_without_a_word_would_get_everything(site: Site, shell: Shell) -> None:
    """Broken: a destination gets a new name, its receiver gets all old events again, and nobody was told."""
    assert site.check() == (0, "")
    site.write(one_pipe("late", ["name: new"]))
    words = (
        "late/new: new destination, will receive 2,800 events of s from the beginning. Try: `start: latest` for new ones only; "
        "or `renamed_from: old`, if it is old under a new name"
    )
    assert words in site.check()[1]
    (change,) = site.changes()
    assert (change["change"], change["name"], change["events"]) == ("new", "late/new", {"s": 2800})
    site.write(one_pipe("late", ["name: new, start: latest"]))
    assert (
        "late/new: new destination, new events only (start: latest); 2,800 events of s are not sent" in site.check()[1]
    )
    site.write(one_pipe("late", ["name: new"]))
    assert shell.run("apply") == 0, "it finds the log of the fleet on --data"
    assert words in shell.said
    assert "late/new: new destination, will receive 2,800 events of s" in site.check()[1], "it has not begun"


def test_a_former_name_that_runs_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `penstock apply` copies the position of a destination that goes on, and its events come twice, without a word."""
    site.deliver("late/old", 2799)
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    assert "late/old runs" not in site.check()[1]

    async def members(_admin: object, group: str) -> list[str]:
        return ["m-1"] if group == "late.old" else []

    monkeypatch.setattr(LogAdmin, "members", members)
    assert "(0 events of s unread). late/old runs. `penstock apply` copies its position at once" in site.check()[1]


def test_a_former_name_hands_over_its_position_once(site: Site) -> None:
    """Broken: a renamed destination gets the whole stream again, or is set back by the line that stays in the file."""
    site.send(5)
    site.deliver("late/old", 2801)
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    said = site.check()[1]
    assert "late/new: continues at the position of late/old (3 events of s unread)" in said
    assert "not yet delivered to late/old" not in said, "the same events twice sound like a warning"
    site.start()
    assert site.position("late/new") == 2801
    site.deliver("late/new", 2803)
    site.deliver("late/old", 2804)
    for _ in range(2):
        site.start()
        assert site.position("late/new") == 2803
        assert site.check() == (0, "")


def test_a_name_that_has_begun_is_not_moved(site: Site) -> None:
    """Broken: `renamed_from` comes a day late, and skips events that only the old name has read."""
    site.deliver("late/new", 100)
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    assert "late/new: has begun before and keeps its own position" in site.check()[1]
    site.start()
    assert site.position("late/new") == 100


def test_a_name_that_has_begun_says_what_it_does_not_deliver(site: Site, shell: Shell) -> None:
    """Broken: a lagging destination gets a name that is further ahead, and its unread events are left without a word."""
    site.deliver("late/old", 99)
    site.deliver("late/new", 2700)
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    words = site.check()[1]
    assert (
        "keeps its own position (99 events of s unread); it does not take over the position of late/old, which" in words
    )
    assert "Try: penstock group reset late/new --to-offset s:0:100 before the start" in words
    assert "2700 events of s not yet delivered to late/old: late/new reads s" in words
    assert shell.run("group", "reset", "late/new", "--to-offset", "s:0:100", "--yes") == 0
    site.start()
    assert site.position("late/new") == 99


def test_a_former_name_that_nothing_had_is_named(site: Site) -> None:
    """Broken: a misspelt former name takes over nothing, and check finds no fault."""
    site.write(one_pipe("late", ["name: new, renamed_from: odl"]))
    status, words = site.check()
    assert status == 0
    unknown = "late/new: renamed_from: odl: no destination had this name here, so it takes over nothing. Try: old "
    assert unknown in words
    site.write(one_pipe("later", ["name: old"], more="renamed_from: laet, ", rest="removed: {late: {drop: over}}\n"))
    assert (
        "later: renamed_from: laet: no pipe had this name here, so it takes over nothing. Try: late "
        in (site.check()[1])
    )
    site.write(one_pipe("later", ["name: old", "name: added"], more="renamed_from: late, "))
    assert "renamed_from:" not in site.check()[1]
    site.write(one_pipe("other", ["name: a"]))
    site.start()
    site.write(one_pipe("later", ["name: old"], more="renamed_from: late, ", rest="removed: {other: {drop: over}}\n"))
    assert "renamed_from:" not in site.check()[1], "a pipe of an earlier start"


def test_two_destinations_swap_their_names(site: Site) -> None:
    """Broken: a name is used again, and its receiver gets what the earlier holder of the name had not read, or misses its own."""
    site.write(one_pipe("late", ["name: a, renamed_from: old", "name: b"]))
    site.deliver("late/b", 99)
    site.start()
    for step in (["name: mid, renamed_from: a", "name: b"], ["name: mid", "name: a, renamed_from: b"]):
        site.write(one_pipe("late", step))
        site.start()
    assert (site.position("late/mid"), site.position("late/a")) == (2799, 99)
    site.write(one_pipe("late", ["name: b, renamed_from: mid", "name: a"]))
    assert "late/b: continues at the position of late/mid (0 events of s unread)" in site.check()[1]
    for _ in range(2):
        site.start()
        assert (site.position("late/b"), site.position("late/a")) == (2799, 99)
    site.deliver("late/b", 50)  # an operator set it back since
    site.start()
    assert site.position("late/b") == 50


def test_a_destination_that_is_put_back_with_its_former_name(site: Site) -> None:
    """Broken: a removal is undone, the old line is still there, and the receiver gets everything since the rename again."""
    renamed = one_pipe("late", ["name: new, renamed_from: old", "name: x, start: latest"])
    site.write(renamed)
    site.start()
    site.send(10)
    site.deliver("late/new", 2804)
    site.write(one_pipe("late", ["name: x"]) + "removed: {late/new: {drop: why}, late/old: {drop: why}}\n")
    site.start()
    site.write(renamed)
    assert "late/new: has begun before and keeps its own position (5 events of s unread)" in site.check()[1]
    site.start()
    assert site.position("late/new") == 2804
    site.write(one_pipe("late", ["name: x"]) + "removed: {late/new: {drop: why}}\n")
    site.start()
    site.write(renamed)
    assert "late/new: is back, continues where it ended and will receive 5 events of s" in site.check()[1]
    site.start()
    assert site.position("late/new") == 2804


def test_names_in_a_circle(site: Site) -> None:
    """Broken: a destination gets its first name back after a third one, and its receiver gets everything since."""
    for at, (new, former) in enumerate((("b", "old"), ("c", "b"), ("old", "c"))):
        site.write(one_pipe("late", [f"name: {new}, renamed_from: {former}"]))
        site.start()
        assert site.position(f"late/{new}") == 2799 + at
        site.deliver(f"late/{new}", 2800 + at)


def test_a_name_between_is_left_out(site: Site) -> None:
    """Broken: a file is rolled back, or names the first name again, and nobody sees that the deliveries since are repeated."""
    site.write(one_pipe("late", ["name: mid, renamed_from: old"]))
    site.start()
    site.send(10)
    site.deliver("late/mid", 2809)
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    words = "continues at the position of late/old (10 events of s unread), which got the name mid since. Try: `renamed_from"
    assert words in site.check()[1]
    site.write(one_pipe("late", ["name: old"]))
    assert "will receive 10 events of s" in site.check()[1]
    assert "; or `renamed_from: mid`, if it is mid under its former name" in site.check()[1]
    site.write(one_pipe("late", ["name: old, renamed_from: mid"]))
    assert "late/old: continues at the position of late/mid (0 events of s unread)" in site.check()[1]
    assert "Try" not in site.check()[1]


def test_offsets_are_not_moved_before_a_takeover(site: Site, shell: Shell) -> None:
    """Broken: a reset before the first start under a new name is undone by that start; a skip counts events as skipped that were
    delivered under the former name."""
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    for move in (("skip", "--to-end", "--reason", "why"), ("reset", "--to-earliest")):
        assert shell.run("group", move[0], "late/new", *move[1:], "--yes") == 1
        assert "late/new gets the position of late/old first, and has not got it yet" in shell.said
    assert site.records("penstock.telemetry") == []
    site.start()
    assert shell.run("group", "reset", "late/new", "--to-earliest", "--yes") == 0
    site.write(one_pipe("late", ["name: old, renamed_from: new"]))
    assert shell.run("group", "reset", "late/old", "--to-offset", "s:0:7", "--yes") == 1
    site.start()
    assert site.position("late/old") == -1, "it was set back under its other name"


def test_unread_events_of_a_stream_that_the_other_one_does_not_read(site: Site) -> None:
    """Broken: check says that unread events are delivered to another destination, which does not read their stream."""
    site.deliver("late/old", 2796)
    more = f"  b: {{sources: [t], destinations: [{{name: one, {HOOK}}}]}}\nremoved: {{late/old: "
    text = one_pipe("late", ["name: x"]).replace("{s: {}}", "{s: {}, t: {}}") + more
    for choice, words in (
        (
            "{deliver_to: b/one}}\n",
            "3 events of s not yet delivered to late/old: they stay there; b/one does not read it",
        ),
        ("{bury: why}}\n", "3 events of s not yet delivered to late/old: they stay there"),
        ("{deliver_to: late/x}}\n", "late/x: continues at the position of late/old (3 events of s unread)"),
    ):
        site.write(text + choice)
        assert words in site.check()[1]


def test_a_pipe_and_its_destination_get_new_names(site: Site) -> None:
    """Broken: the second name of a destination begins where its first name ended, and sends again what came in between."""
    site.write(one_pipe("late", ["name: mid, renamed_from: old"]))
    site.start()
    site.send(10)
    site.deliver("late/mid", 2804)
    site.write(one_pipe("shop", ["name: mid, renamed_from: old"], more="renamed_from: late, "))
    assert "shop/mid: continues at the position of late/mid (5 events of s unread)" in site.check()[1]
    site.start()
    assert site.position("shop/mid") == 2804
    assert list(renames_of(load_pipes(site.path))) == ["late/mid", "late/old", "shop/old"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            one_pipe("late", ["name: a", "name: b, renamed_from: a"]),
            "pipes.yaml:3: pipes.late.destinations[b].renamed_from: 'a' is still a destination of this pipe",
        ),
        (one_pipe("late", ["name: a, renamed_from: a"]), "'a' is still a destination of this pipe"),
        (
            one_pipe("late", ["name: a, renamed_from: x", "name: b, renamed_from: x"]),
            "destinations[b].renamed_from: 'x' is the former name of 'a' already",
        ),
        (one_pipe("late", ["name: a"], more="renamed_from: late, "), "'late' is still a pipe of this file"),
        (
            one_pipe("late", ["name: a"], more="renamed_from: x, ")
            + f"  more: {{sources: [s], renamed_from: x, destinations: [{{name: a, {HOOK}}}]}}\n",
            "pipes.more.renamed_from: 'x' is the former name of 'late' already",
        ),
        (
            one_pipe("late", ["name: a"], more="renamed_from: x, transform: {sql: SELECT * FROM s}, "),
            "a pipe with a transform cannot be renamed",
        ),
        (
            one_pipe("late", ["name: a, renamed_from: x"], rest="removed: {late/x: {drop: why}}\n"),
            "removed.late/x: is a former name of late/a, which gets its events",
        ),
        (
            one_pipe("late", ["name: a"], rest="removed: {x: {deliver_to: late/a}}\n"),
            "removed.x.deliver_to: a pipe has several destinations",
        ),
        (one_pipe("late", ["name: a"], rest="removed: {late: {drop: why}}\n"), "removed.late: is still in this file"),
    ],
)
def test_contradictions_are_refused(shell: Shell, tmp_path: Path, text: str, words: str) -> None:
    """Broken: two destinations would get the events of one, or one that still runs gives them away."""
    (tmp_path / "pipes.yaml").write_text(text)
    assert shell.run("check") == 2
    assert words in shell.said


def test_a_former_name_is_no_part_of_the_definition(tmp_path: Path) -> None:
    """Broken: every dead letter shows another version of its pipe after an upgrade, or after the line is removed."""
    versions = set()
    for keys in ("name: a", "name: a, renamed_from: b"):
        (tmp_path / "pipes.yaml").write_text(one_pipe("late", [keys]))
        versions.add(pipe_version(load_pipes(tmp_path / "pipes.yaml").pipes["late"]))
    assert len(versions) == 1


def test_dead_letters_of_a_former_name(site: Site, shell: Shell) -> None:
    """Broken: the letters of a renamed pipe or destination are found by nobody, and can never be sent again."""
    site.put("late.dead", [letter("late", "old", number) for number in range(3)])
    site.write(one_pipe("shop", ["name: new, renamed_from: old"], more="renamed_from: late, "))
    site.start()
    for flags in (["--destination", "new"], ["--pipe", "shop"], ["--destination", "old"], ["--pipe", "late"]):
        assert shell.run("dead", "list", *flags, "--json") == 0
        assert len(shell.out.splitlines()) == 3, flags
    assert shell.run("dead", "list", "--destination", "newer", "--json") == 2
    assert "there is no destination newer; did you mean new?" in shell.err
    assert shell.run("dead", "redrive", "--destination", "new") == 0
    sent = [unwrap(record)[1] for record in site.records("shop.retry")]
    assert [(state.pipe, state.destination) for state in sent] == [("shop", "new")] * 3


def test_a_pause_of_a_former_name_counts(site: Site) -> None:
    """Broken: a receiver asked for a pause, its destination gets a new name, and everything parked is sent."""
    pause = Pause("paused", OPERATOR, "me", 1)

    async def work() -> list[str]:
        async with open_broker(site.url) as broker, Producer(broker.appender) as producer:
            await write_pause(producer, "late/old", pause)
            pauses = Pauses(broker.reader, {"late/old": "late/new"})
            await pauses.refresh()
            paused = list(pauses.paused())
            await write_pause(producer, "late/new", Pause("resumed", OPERATOR, "me", 2))
            await pauses.refresh()
            return [*paused, *pauses.paused()]

    assert asyncio.run(work()) == ["late/new"]


def test_parked_events_of_a_former_name_are_counted_once(site: Site, shell: Shell) -> None:
    """Broken: after a rename `destination list` has lost the parked events, or has them twice."""

    def parked() -> list[int]:
        assert shell.run("destination", "list", "--json") == 0
        return [json.loads(line)["parked"] for line in shell.out.splitlines()]

    site.put("late.parked", [waiting_event("late/old", number) for number in range(3)])
    site.write(one_pipe("late", ["name: new, renamed_from: old", "name: other"]))
    assert parked() == [3, 0]
    site.start()
    site.put("late.parked", [waiting_event("late/new", number) for number in range(3)])  # as expel takes them over
    commit(site.url, "late.old", "late.parked", 2)
    assert parked() == [3, 0]


def test_a_pause_stays_when_the_former_name_leaves_the_file(site: Site) -> None:
    """Broken: another destination gets the former name, and the paused receiver gets requests again; or a pause of long ago is
    in force again."""

    async def change(name: str, state: Literal["paused", "resumed"]) -> None:
        async with open_broker(site.url) as broker, Producer(broker.appender) as producer:
            await write_pause(producer, name, Pause(state, OPERATOR, "me", 1))

    async def read(broker: Broker) -> list[str]:
        pauses = Pauses(broker.reader, renames_of(await asyncio.to_thread(load_pipes, site.path)))
        await pauses.refresh()
        return list(pauses.paused())

    def paused() -> list[str]:
        return at_broker(site.url, read)

    asyncio.run(change("late/old", "paused"))
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    site.start()
    length = len(site.records("penstock.control"))
    site.start()
    assert len(site.records("penstock.control")) == length
    site.write(one_pipe("late", ["name: new"]))
    assert "late/new" in paused()
    asyncio.run(change("late/new", "resumed"))
    site.write(one_pipe("late", ["name: old, renamed_from: new"]))
    site.start()
    site.write(one_pipe("late", ["name: old"]))
    assert "late/old" not in paused()


def test_an_ordered_destination_with_waiting_events(site: Site) -> None:
    """Broken: an ordered destination is renamed while events wait for it, and nobody says that they come after newer ones."""
    site.put("late.parked", [waiting_event("late/old", 1)])
    site.write(one_pipe("late", ["name: new, renamed_from: old"]).replace("org/'", "org/', order: key"))
    assert "delivered to late/new, some after newer events of their keys" in site.check()[1]


def test_a_removed_pipe_needs_one_line(site: Site, shell: Shell, tmp_path: Path) -> None:
    """Broken: a pipe is removed, and 405 dead letters, open windows and unread events are left behind with "is good"."""
    site.put("late.dead", [letter("late", "old", number) for number in range(405)])
    site.send(3)
    site.put("late.parked", [waiting_event("late/old", 1)])
    folder = tmp_path / "data" / "checkpoints" / "late"
    folder.mkdir(parents=True)
    (folder / "penstock.json").write_text(json.dumps({"transform": "x", "ran": True, "state": "windows"}))
    other = (
        f"streams: {{s: {{}}}}\npipes:\n  other: {{sources: [s], destinations: [{{name: a, start: latest, {HOOK}}}]}}\n"
    )
    site.write(other)
    status, told = site.check()
    assert status == 2
    assert (
        "removed.late: the pipe late has 405 open dead letters, its transform has state over several events in" in told
    )
    assert "add these lines with your reason" in told
    assert "     removed:       late: {drop: WHY} " in told
    assert "removed.late/old: 1 event waits (1 in late.parked) for late/old, 3 events of s not yet delivered" in told
    assert shell.run("apply", "--broker", site.url) == 2
    site.write(f"{other}removed: {{late: {{drop: it is over}}}}\n")
    status, told = site.check()
    assert (status, "1 event waits (1 in late.parked) for late/old: dropped" in told) == (0, True)
    assert "3 events of s not yet delivered to late/old: they stay there" in told
    assert shell.run("apply", "--broker", site.url) == 0
    site.write(f"{other}removed: {{late/old: {{drop: it is over}}}}\n")
    assert site.check()[0] == 0, "decided once"


def test_letters_of_a_removed_pipe_go_to_another_destination(site: Site, shell: Shell) -> None:
    """Broken: the letters of a pipe that is gone can never be sent again, and the refusal does not say how."""
    site.put("late.dead", [letter("late", "old", number) for number in range(2)])
    site.write(one_pipe("shop", ["name: hook"], rest="removed: {late: {drop: it is over}}\n"))
    site.start()
    assert shell.run("destination", "show", "old") == 0
    assert "2 dead letters for old, 1 cause\n" in shell.err
    assert shell.run("dead", "redrive", "--pipe", "late") == 1
    assert "unknown_destination 2, e.g. late.dead:0:0: the pipe file no longer has this destination. Try: --to" in (
        shell.said
    )
    assert shell.run("dead", "redrive", "--pipe", "late", "--to", "shop/nobody") == 2
    assert "has no such webhook" in shell.err
    assert shell.run("dead", "redrive", "--pipe", "late", "--to", "shop/hook") == 0
    assert [unwrap(record)[1].destination for record in site.records("shop.retry")] == ["hook", "hook"]


def test_letters_of_a_transform_that_is_gone_go_to_their_stream(site: Site, shell: Shell) -> None:
    """Broken: a pipe with a transform gets a new name, and what failed in it can never be transformed again."""
    site.put("late.dead", [letter("late", "", 0)])
    site.write(one_pipe("shop", ["name: hook"], rest="removed: {late: {drop: it is over}}\n"))
    site.start()
    assert shell.run("dead", "redrive", "--pipe", "late") == 1
    assert "it fails again unless `columns` or the transform are corrected first; or send a corrected" in shell.err
    assert shell.run("dead", "redrive", "--pipe", "late", "--to-stream") == 0
    assert len(site.records("s")) == 2801
    site.write(one_pipe("shop", ["name: hook"]).replace("sources: [s]", "sources: [t]").replace("{s: {}}", "{t: {}}"))
    assert shell.run("dead", "redrive", "late.dead:0:0", "--to-stream") == 1
    assert "no pipe of the pipe file reads its stream" in shell.err


def test_letters_of_a_removed_destination_are_named(site: Site) -> None:
    """Broken: a destination is removed, and its dead letters stay for ever."""
    site.put("late.dead", [letter("late", "old", number) for number in range(2)])
    site.write(one_pipe("late", ["name: other, start: latest"]))
    assert (
        "late/old: removed, with 2 dead letters. Try: penstock dead redrive --pipe late --destination old --to PIPE"
        in site.check()[1]
    )


def test_letters_of_the_name_before_the_former_one_are_named(site: Site, shell: Shell) -> None:
    """Broken: a destination gets its third name, and the dead letters of the first one are in no list and in no redrive."""
    site.put("late.dead", [letter("late", "old", number) for number in range(3)])
    site.write(one_pipe("late", ["name: mid, renamed_from: old"]))
    assert "late/old: removed" not in site.check()[1]
    site.start()
    site.write(one_pipe("late", ["name: new, renamed_from: mid"]))
    words = "late/old: removed, with 3 dead letters. Try: penstock dead redrive --pipe late --destination old --to"
    assert words in site.check()[1]
    site.start()
    assert words not in site.check()[1]


def test_a_new_transform_reads_everything(site: Site) -> None:
    """Broken: a pipe gets a transform, and its receivers get the results of all old events unannounced."""
    site.write(one_pipe("late", ["name: old"], more="transform: {sql: SELECT * FROM s}, "))
    told = " ".join(site.check()[1].split())
    assert "late: new transform, will read 2,800 events of s from the beginning; " in told
    assert "also of events that they have received without it" in told


def test_a_first_start_with_a_transform_changes_nothing(tmp_path: Path, shell: Shell) -> None:
    """Broken: `penstock up` refuses a new data folder, because the streams to be counted are not created yet."""
    site = Site(tmp_path, shell)
    site.write(one_pipe("late", ["name: old"], more="transform: {sql: SELECT * FROM s}, "))
    assert asyncio.run(check_changes(site.url, load_pipes(site.path), site.path, None)) == []


def test_a_changed_transform_with_state(site: Site, tmp_path: Path) -> None:
    """Broken: `check` finds a query good that the transform service refuses, because the former one left open windows."""
    folder = tmp_path / "data" / "checkpoints" / "late"
    folder.mkdir(parents=True)
    site.write(one_pipe("late", ["name: old"], more="transform: {sql: SELECT 1 FROM s}, "))
    site.start()
    for sql, told in (("SELECT 1 FROM s", False), ("SELECT 2 FROM s", True)):
        found = {"transform": hashlib.sha256(sql.encode()).hexdigest(), "ran": True, "state": "windows"}
        (folder / "penstock.json").write_text(json.dumps(found))
        assert ("late: changed transform; the former one left state" in site.check()[1]) == told


def test_a_changed_transform_whose_mark_says_what_it_left(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `check` asks Spark though nothing changed, or hides that it got no answer, or goes on when the answer is no."""
    (site.path.parent / "code.py").write_text("def f(s): return s")
    site.write(one_pipe("late", ["name: old"], more="transform: {python: 'code.py:f'}, "))
    site.start()
    transform = load_pipes(site.path).pipes["late"].transform
    assert transform is not None
    plan = StatePlan([], {}, ["s"], "", "4", text_digest(transform, {"s": None}, "def f(s): return s"))

    async def mark(state: Literal["begun", "reset"]) -> None:
        async with open_broker(site.url) as broker, Producer(broker.appender) as producer:
            await write_transform_mark(producer, "late", state, "1", "transform", plan)

    asked: list[dict[str, StatePlan]] = []

    def fail(_module: str, arguments: Sequence[str | Path], _scratch: Path, _remedy: str) -> None:
        asked.append(msgspec.msgpack.decode(Path(arguments[7]).read_bytes(), type=dict[str, StatePlan]))
        if len(asked) == 1:
            raise CommandFailed("no Java is there")
        if len(asked) == 2:
            Path(arguments[9]).write_bytes(msgspec.msgpack.encode(StateCheck()))
            return
        problem = Problem(
            "pipes.yaml:3", "pipes.late.transform.python", "the checkpoint has the state of another transform"
        )
        Path(arguments[9]).write_bytes(msgspec.msgpack.encode(StateCheck([problem])))

    monkeypatch.setattr("services.fleet.pipes.state_check.run_spark", fail)
    asyncio.run(mark("begun"))
    assert site.check()[0] == 0
    assert not asked, "the text is the same"
    (site.path.parent / "code.py").write_text("def f(s): return s.distinct()")
    status, told = site.check()
    assert status == 0
    assert "late: changed transform; whether it can use the state of the former one is not known" in told
    assert "no Java is there" in told
    assert asked == [{"late": plan}]
    status, told = site.check()
    assert (status, "late: changed transform, continues with the state" in told) == (0, True)
    assert site.check()[0] == 2
    with pytest.raises(BadConfiguration, match="the state of another transform"):
        asyncio.run(check_changes(site.url, load_pipes(site.path), site.path, None))
    asyncio.run(mark("reset"))
    assert site.check()[0] == 0
    assert len(asked) == 4, "it begins again, so there is no state"


def test_a_new_source_is_read_from_the_beginning(site: Site) -> None:
    """Broken: a source is added to a pipe, and the receiver gets all of its old events unannounced."""
    text = one_pipe("late", ["name: old"]).replace("{s: {}}", "{s: {}, t: {partitions: 1}}")
    site.write(text)
    site.start()
    site.put("t", [waiting_event("any/one", 1)])
    site.write(text.replace("[s]", "[s, t]"))
    words = "late/old: begins to read t, will receive 1 event of t from the beginning"
    assert words in site.check()[1]
    site.write(text.replace("[s]", "[t]"))
    assert words in site.check()[1], "also instead of the former one"


def test_a_name_that_comes_back(site: Site) -> None:
    """Broken: a destination is put back after a month, and its receiver gets the events of the month unannounced."""
    other = one_pipe("late", ["name: new, start: latest"])
    site.write(other)
    site.start()
    site.send(7)
    site.write(one_pipe("late", ["name: new, start: latest", "name: old"]))
    words = "late/old: is back, continues where it ended and will receive 7 events of s"
    assert words in site.check()[1]

    async def look() -> list[str]:
        pipes = await asyncio.to_thread(load_pipes, site.path)
        async with (
            open_broker(site.url) as broker,
            broker.consumer("late.old", ["s"], start="earliest", on_revoke=AsyncMock()) as consumer,
        ):
            await consumer.poll(max_records=1, max_wait=0.1)
            return [change.kind for change in (await find_changes(broker, pipes, site.path, None)).lines]

    assert "back" not in asyncio.run(look()), "a roll-out has begun it, and nobody has recorded that"
    assert words in site.check()[1]
    site.start()
    assert "late/old" not in site.check()[1]


def test_retention_by_the_clients_clocks_is_told(site: Site, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after an upgrade on Kafka nobody hears that a client's clock still decides when its events are deleted."""
    site.write(one_pipe("late", ["name: a"]))
    site.start()
    assert "LogAppendTime" not in site.check()[1]

    altered: list[str] = []

    async def alter(_: LogAdmin, topics: Collection[str]) -> None:
        altered.extend(topics)

    monkeypatch.setattr(LogAdmin, "kept_by_event_time", AsyncMock(side_effect=frozenset))
    monkeypatch.setattr(LogAdmin, "keep_by_storing", alter)
    assert "s: Kafka counts its retention from the clients' clocks" in site.check()[1]
    assert altered == []
    where = "-f", str(site.path), "--broker", site.url, "--allow-networks", "127.0.0.0/8", "--log-append-time", "--json"
    assert shell.run("apply", *where) == 0
    told = json.loads(shell.out)
    assert (altered, told["altered"]) == (["s"], ["s"])
    assert [change for change in told["changes"] if change["change"] == "retention"] == []


def test_empty_streams_change_nothing(shell: Shell, tmp_path: Path) -> None:
    """Broken: a newcomer's first start prints warnings, or fails because no stream is there yet."""
    file, url = tmp_path / "pipes.yaml", f"log://{tmp_path}/fresh/log"
    file.write_text(one_pipe("late", ["name: a, renamed_from: b"], more="transform: {sql: SELECT * FROM s}, "))
    assert shell.run("apply", "--broker", url, "--json") == 0
    assert json.loads(shell.out)["changes"] == []
    assert shell.run("check", "--broker", url) == 0
    assert shell.err.count("\n") == 2, shell.err
    assert "note: micro-batch, not real-time, in late: only Kafka can be read in real-time mode" in shell.err
    assert "the transform was not analysed" in shell.err


def test_where_offsets_do_not_count_events(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: on Kinesis, a sequence number is shown as the number of events."""
    monkeypatch.setattr(log_broker, "FEATURES", replace(log_broker.FEATURES, contiguous_offsets=False))
    site.write(one_pipe("late", ["name: new"]))
    assert "late/new: new destination, will receive all events of s from the beginning" in site.check()[1]
    assert site.changes()[0]["events"] == {"s": None}


def test_a_takeover_while_the_group_has_members(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a name is used again while an instance with the earlier file reads for it, and apply blames the topics."""
    monkeypatch.setattr("services.fleet.pipes.topics.PATIENCE_S", 0.0)
    site.write(one_pipe("late", ["name: new, renamed_from: old"]))
    site.start()
    site.deliver("late/new", 2798)
    site.write(one_pipe("late", ["name: old, renamed_from: new"]))

    async def work() -> None:
        pipes = await asyncio.to_thread(load_pipes, site.path)
        async with (
            open_broker(site.url) as broker,
            broker.consumer("late.old", ["s"], start="earliest", on_revoke=AsyncMock()) as consumer,
        ):
            await consumer.poll(max_records=1, max_wait=0.1)
            with pytest.raises(CommandFailed, match="a destination cannot take over its position"):
                await prepare(site.url, pipes, site.path)

    asyncio.run(work())
    site.start()
    assert site.position("late/old") == 2798
