"""A destination leaves the pipe file while events wait for it: nothing starts before it is said what becomes of them."""

import asyncio
import json
from pathlib import Path

import pytest

from services.core.broker.record import TopicPartition
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.snapshot import read_contents, write_snapshot
from services.core.pipe_file.topic_names import RETRIER_GROUP, delay_topic
from services.core.undelivered.dead_letter import DeadLetter, Position, make_dead_letter
from services.core.undelivered.retry_state import unwrap
from services.core.yaml_source import BadConfiguration
from services.fleet.dead.redrive import RedriveRecord, RedriveTargets
from services.fleet.pipes.topics import PreparedTopics, prepare
from services.fleet.up.plan import make_plan
from services.fleet.up.settings import UpSettings
from tests.support.waiting_events import stored, waiting_event
from tests.unit.fleet.conftest import Shell, at_broker, commit, make_fleet, put

HOOK = "webhook: {url: 'https://example.org/'}"
BEFORE = f"streams: {{s: {{}}}}\npipes:\n  late: {{sources: [s], destinations: [{{name: old, {HOOK}}}]}}\n"
AFTER = f"streams: {{s: {{}}}}\npipes:\n  late: {{sources: [s], destinations: [{{name: new, {HOOK}}}]}}\n"


@pytest.fixture(autouse=True)
def url(tmp_path: Path) -> str:
    """A fleet that had `late/old`, for which two events wait; the file has `late/new` in its place."""
    url = f"log://{make_fleet(tmp_path, BEFORE)}/data/log"
    for number, topic in enumerate((delay_topic(64), "late.parked"), 1):
        put(url, topic, [waiting_event("late/old", number)])
    (tmp_path / "pipes.yaml").write_text(AFTER)
    return url


def test_refused_until_it_is_told(shell: Shell, tmp_path: Path, url: str) -> None:
    """Broken: a destination is taken out of the file, and what waited for it ends unseen with a topic's retention."""
    for verb in (["check"], ["check", "--broker", url], ["apply", "--broker", url]):
        assert shell.run(*verb) == 2
        words = "removed.late/old: 2 events wait (1 in penstock.delay-64s, 1 in late.parked) for late/old. This file no"
        assert words in shell.said
        assert "Try: put it back. Or, if it has another name now, add there: renamed_from: old Or decide" in shell.said
    assert shell.run("check", "--json") == 2
    (problem,) = json.loads(shell.out)["problems"]
    assert (problem["key"], problem["where"]) == ("removed.late/old", "pipes.yaml")
    for choice in ("deliver_to: late/new", "bury: they left", "drop: they left"):
        (tmp_path / "pipes.yaml").write_text(f"{AFTER}removed: {{late/old: {{{choice}}}}}\n")
        assert shell.run("check", "--json") == 0
        assert json.loads(shell.out)["waiting"] == {"removed": {"late/old": 2}}
        assert shell.run("apply", "--broker", url) == 0
        assert "2 events wait (1 in penstock.delay-64s, 1 in late.parked) for late/old: " in shell.said
    (tmp_path / "pipes.yaml").write_text(BEFORE)
    assert shell.run("check") == 0


def test_without_a_broker_it_says_so(shell: Shell, tmp_path: Path) -> None:
    """Broken: a file cannot be checked on a laptop; or what nobody looked at passes for looked at."""
    assert shell.run("check", "--data", tmp_path / "nothing", "--json") == 0
    assert "holds no log" in json.loads(shell.out)["waiting"]["unknown"]
    assert shell.run("check", "--broker", "nonsense://x") == 0
    assert "are not known" in shell.err


def test_an_entry_that_is_done_can_go(shell: Shell, tmp_path: Path) -> None:
    """Broken: nobody knows when all of it has gone where it was to go."""
    (tmp_path / "pipes.yaml").write_text(f"{AFTER}removed: {{late/older: {{drop: why}}, late/old: {{drop: why}}}}\n")
    assert shell.run("check") == 0
    assert "nothing waits for late/older any more" in shell.said


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ("{late/new: {drop: why}}", "is still in this file"),
        ("{late/old: {deliver_to: late/nobody}}", "is no webhook of this file: late/new"),
        ("{late/old: {deliver_to: late/old}}", "is no webhook of this file"),
        ("{late/old: {bury: why, drop: why}}", "exactly one of deliver_to, bury and drop"),
        ("{late/old: {}}", "exactly one of deliver_to, bury and drop"),
        ("{late/old: {drop: ''}}", "at least 1 character"),
        ("{late: {drop: why}}", "removed"),
    ],
)
def test_what_cannot_be_meant_is_refused(shell: Shell, tmp_path: Path, removed: str, words: str) -> None:
    """Broken: a typo buries or drops, or sends to nobody."""
    (tmp_path / "pipes.yaml").write_text(f"{AFTER}removed: {removed}\n")
    assert shell.run("check") == 2
    assert words in shell.said


def test_nothing_is_changed_before_it_is_told(tmp_path: Path, url: str) -> None:
    """Broken: `penstock up` begins a change that it then refuses."""
    (tmp_path / "pipes.yaml").write_text(AFTER.replace("late:", "later:"))
    pipes = load_pipes(tmp_path / "pipes.yaml")
    with pytest.raises(BadConfiguration, match=r"removed\.late/old"):
        asyncio.run(prepare(url, pipes, tmp_path / "pipes.yaml"))
    assert "later.dead" not in at_broker(url, lambda broker: broker.admin.topics())
    assert at_broker(url, lambda broker: stored(broker, "penstock.control")) == []


@pytest.mark.parametrize("settled", [-1, 0])
def test_the_retrier_runs_where_its_topics_exist(tmp_path: Path, url: str, settled: int) -> None:
    """Broken: the last schedule is turned off, and every event that waits in a delay topic, or whose append arrives after `up`
    looked, stays there for ever."""
    commit(url, RETRIER_GROUP, delay_topic(64), settled)
    (tmp_path / "pipes.yaml").write_text(BEFORE.replace("'}", "', schedule: []}"))
    pipes = load_pipes(tmp_path / "pipes.yaml")
    topics = asyncio.run(prepare(url, pipes, tmp_path / "pipes.yaml")).topics
    write_snapshot(tmp_path / "snapshot", read_contents([tmp_path / "pipes.yaml"]))
    settings = UpSettings(pipes=tmp_path / "pipes.yaml", data=tmp_path / "data")
    plan = make_plan(settings, pipes, url, None, tmp_path / "snapshot", has_retrier=topics.has_retrier)
    assert "retrier" in [spec.service for spec in plan.services]


def test_no_retrier_without_a_schedule(tmp_path: Path) -> None:
    """Broken: a process and eleven topics for nothing, in a fleet that never had a schedule."""
    (tmp_path / "pipes.yaml").write_text(BEFORE.replace("'}", "', schedule: []}"))
    pipes = load_pipes(tmp_path / "pipes.yaml")
    topics = asyncio.run(prepare(f"log://{tmp_path}/other/log", pipes, tmp_path / "pipes.yaml")).topics
    assert not topics.has_retrier
    write_snapshot(tmp_path / "snapshot", read_contents([tmp_path / "pipes.yaml"]))
    settings = UpSettings(pipes=tmp_path / "pipes.yaml", data=tmp_path / "data")
    plan = make_plan(settings, pipes, "log:", None, tmp_path / "snapshot", has_retrier=topics.has_retrier)
    assert "retrier" not in [spec.service for spec in plan.services]


def test_a_redrive_follows_the_new_name(tmp_path: Path) -> None:
    """Broken: letters of a renamed destination can never be sent again, or go to a retry topic where nobody wants them."""
    record, _ = unwrap(waiting_event("late/old", 1))
    source = TopicPartition("s", 0)
    made = make_dead_letter(
        record,
        reason="x",
        detail="",
        node="expel",
        pipe="late",
        destination="old",
        first_failure=1,
        now_ms=2,
        source=source,
        offset=1,
    )
    letter = DeadLetter.of(Position("late.dead", 0, 1), made)
    for removed, expected in (
        ("{late/old: {deliver_to: late/new}}", "new"),
        ("{late/old: {drop: why}}", None),
        ("{}", None),
    ):
        (tmp_path / "pipes.yaml").write_text(f"{AFTER}removed: {removed}\n")
        aimed = RedriveTargets(load_pipes(tmp_path / "pipes.yaml"), to_stream=False).resolve(letter, 5)
        if expected is None:
            assert aimed == "unknown_destination"
        else:
            assert isinstance(aimed, RedriveRecord)
            assert unwrap(aimed.record)[1].destination == expected


def fill(url: str) -> None:
    put(url, "s", [waiting_event("late/any", number) for number in range(10)])


def prepared(url: str, path: Path) -> PreparedTopics:
    return asyncio.run(prepare(url, load_pipes(path), path))


def test_what_was_not_read_of_a_stream_is_said_once(shell: Shell, tmp_path: Path) -> None:
    """Broken: a destination that is behind is taken out of the file, and what it had not read is delivered to nobody, unsaid."""
    url, file = f"log://{tmp_path}/streams/log", tmp_path / "pipes.yaml"
    file.write_text(BEFORE)
    prepared(url, file)
    fill(url)
    commit(url, "late.old", "s", 6)
    file.write_text(AFTER)
    assert shell.run("check", "--broker", url) == 2
    assert "removed.late/old: 3 events of s not yet delivered to late/old. This file no" in shell.said
    with pytest.raises(BadConfiguration, match=r"removed\.late/old"):
        prepared(url, file)
    file.write_text(f"{AFTER}removed: {{late/old: {{drop: they left}}}}\n")
    assert prepared(url, file).waiting.undelivered == {"late/old": {"s": 3}}
    file.write_text(AFTER)
    assert prepared(url, file).waiting.undelivered == {}
    assert shell.run("check", "--broker", url) == 0


def test_renamed_and_renamed_back(tmp_path: Path) -> None:
    """Broken: a destination that gets its first name back sends again all that its other name has delivered."""
    url, file = f"log://{tmp_path}/streams/log", tmp_path / "pipes.yaml"
    file.write_text(BEFORE)
    prepared(url, file)
    fill(url)
    commit(url, "late.old", "s", 2)
    file.write_text(f"{AFTER}removed: {{late/old: {{deliver_to: late/new}}}}\n")
    prepared(url, file)

    def read(group: str) -> dict[int, int]:
        return at_broker(url, lambda broker: broker.admin.committed(group, "s"))

    assert read("late.new") == {0: 2}
    commit(url, "late.new", "s", 7)
    file.write_text(f"{BEFORE}removed: {{late/new: {{deliver_to: late/old}}}}\n")
    assert prepared(url, file).waiting.undelivered == {"late/new": {"s": 2}}
    assert read("late.old") == {0: 7}
    prepared(url, file)
    assert read("late.old") == {0: 7}
