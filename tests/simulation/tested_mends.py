"""Mends that no history shows, and for each the test that must fail without it.

The change is made in a copy of the tree, so that programs that a test starts, and files that are no Python, have it too.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.patch import ROOT, Change
from tests.support.turns import VARIABLE

_LIMIT_S, _LONG_LIMIT_S = 240.0, 1200.0
"""Of a test: ten times as long as it needs. One that waits for ever for what the mend does has noticed that it is gone."""
_FAILED = 1
"""The exit status of pytest when a test failed; others mean that none ran."""
_LEFT_OUT = (".git", ".venv", "data", "dist", "node_modules", "__pycache__", ".*_cache", ".hypothesis")


@dataclass(frozen=True, slots=True)
class Mend:
    """One mend. fault: what is broken without it. test: its place for pytest; without the mend it fails. is_long: the test needs
    Spark, or takes more than some seconds."""

    name: str
    fault: str
    changes: tuple[Change, ...]
    test: str
    is_long: bool = False


def _mend(name: str, fault: str, file: str, mended: str, broken: str, test: str, *, is_long: bool = False) -> Mend:
    return Mend(name, fault, (Change(file, mended, broken),), f"tests/{test}", is_long)


_KAFKA, _KINESIS, _LOG = (f"services/core/broker/{name}" for name in ("kafka", "kinesis", "log"))
_INGEST, _SPARK = "services/ingest", "spark/jobs"

HTTP = (
    _mend(
        "read-behind-answers",
        "more requests of a client are read and parsed while it takes none of its answers",
        f"{_INGEST}/connection.py",
        "        self._ahead += data\n        self._count()\n        self.hold_reading()\n",
        "        self._ahead += data\n        self._count()\n",
        "unit/ingest/test_connection.py::test_nothing_is_read_behind_an_answer_that_is_not_taken",
    ),
    _mend(
        "pipelined-uncounted",
        "bytes behind the current request count only when their turn comes",
        f"{_INGEST}/connection.py",
        "held = self._arrived + len(self._ahead) + self._unpacked + self._unsent",
        "held = self._arrived + self._unpacked + self._unsent",
        "unit/ingest/test_connection.py::test_what_is_pipelined_counts_from_its_arrival",
    ),
    _mend(
        "containers-unbounded",
        "five kilobytes of gzip with millions of brackets are parsed",
        f"{_INGEST}/json_scan.py",
        "return brackets > MAX_CONTAINERS or self.count + brackets > MAX_IN_BODY",
        "return False",
        "unit/ingest/test_slices.py::test_containers_are_counted_without_those_in_texts",
    ),
    _mend(
        "parsed-in-one-go",
        "a body of megabytes is parsed in one go, and nobody else is answered meanwhile",
        f"{_INGEST}/body_formats.py",
        "SLICE_BYTES = 1 << 16\n",
        "SLICE_BYTES = 1 << 24\n",
        "unit/ingest/test_slices.py::test_nothing_large_is_parsed_at_once",
    ),
    _mend(
        "bytes-are-free",
        "a quota counts events and not bytes",
        f"{_INGEST}/access.py",
        "        events = -(-size // self._quota_bytes)\n",
        "        events = 0\n",
        "unit/ingest/test_slices.py::test_a_quota_counts_bytes_too",
    ),
    _mend(
        "any-host",
        "ingest without keys answers to every name: a web page sends events by its own (DNS rebinding)",
        f"{_INGEST}/access.py",
        "        if not is_loopback_authority(named) or (target and not is_loopback_authority(target)):\n",
        "        if False:\n",
        "unit/ingest/test_access.py::test_without_keys_only_this_machines_own_names_are_answered",
    ),
    _mend(
        "coding-ignored",
        "a body with Transfer-Encoding: gzip, chunked is stored as it is",
        f"{_INGEST}/http_framing.py",
        'if message.headers[hdrs.TRANSFER_ENCODING].strip(" \\t,").lower() != "chunked":',
        "if not message.chunked:",
        "unit/ingest/test_connection.py::test_a_transfer_coding_beside_chunked_is_501_and_the_end",
    ),
    _mend(
        "announced-by-anybody",
        "whoever reaches the observer excuses alarms, and reads it from anywhere",
        "services/observer/http.py",
        "return [self._check_name, self._check_token]",
        "return [self._check_name]",
        "unit/observer/test_access.py::test_beyond_loopback_everybody_is_asked",
    ),
    _mend(
        "observer-any-name",
        "the observer answers to every name (DNS rebinding)",
        "services/observer/http.py",
        "return [self._check_name, self._check_token]",
        "return [self._check_token]",
        "unit/observer/test_access.py::test_beyond_loopback_everybody_is_asked",
    ),
    _mend(
        "one-id-for-both",
        "the webhook-id of a batch can be that of a single event",
        "services/expel/webhook/sender.py",
        '    return f"{pipe}/{digest}"',
        '    return f"{pipe}:{digest}"',
        "unit/expel/test_webhook.py::test_message_ids_of_different_requests_differ",
    ),
)

MACHINE = (
    _mend(
        "folders-unsynced",
        "a power cut takes a new folder away, and with it what was acknowledged",
        "services/core/folders.py",
        "        folder.mkdir(mode=mode, exist_ok=True)\n        sync_folder(folder.parent)\n",
        "        folder.mkdir(mode=mode, exist_ok=True)\n",
        "faults/test_log_crash.py::test_each_new_name_is_synced_into_its_folder",
        is_long=True,
    ),
    _mend(
        "clock-believed",
        "a clock that is days ahead at the start lets retention delete what nobody has read",
        f"{_LOG}/retention.py",
        "    now = min(system, limit)\n",
        "    now = system\n",
        "unit/log/test_retention.py::test_a_clock_that_is_days_ahead_deletes_nothing_early",
    ),
    _mend(
        "unread-not-kept",
        "what a group has still to read goes with the plain retention",
        f"{_LOG}/retention.py",
        "_UNREAD_FACTOR = 2\n",
        "_UNREAD_FACTOR = 1\n",
        "unit/log/test_retention.py::test_what_a_group_has_still_to_read_is_kept_for_twice_as_long",
    ),
    _mend(
        "unpolled-committed",
        "on the log, an offset that this ownership has not polled is committed, also beyond the end of a topic made anew",
        f"{_LOG}/consumer.py",
        "            if source in owned and offset < owned[source].position\n",
        "            if source in owned\n",
        "unit/log/test_consumer.py::test_a_commit_of_what_was_not_polled_is_refused",
    ),
    _mend(
        "wrong-configuration-ends-all",
        "one service that ends with bad configuration after a ready start ends the whole fleet",
        "services/fleet/up/process.py",
        "                if self._starting():\n",
        "                if True:\n",
        "unit/fleet/test_supervisor.py::test_bad_configuration_after_a_ready_start",
    ),
    _mend(
        "unclaimed-forgotten",
        "up and apply go on although events wait for a destination that the file no longer has",
        "services/fleet/pipes/topics.py",
        "        if problems := name_unclaimed(waiting, pipes, path):\n",
        "        if problems := name_unclaimed(waiting, pipes, path)[:0]:\n",
        "unit/fleet/test_removed.py::test_refused_until_it_is_told",
    ),
    _mend(
        "full-disk-ends-all",
        "a full disk and a restart end the supervisor, and ingest and expel with it",
        "services/fleet/up/supervisor.py",
        "    except OSError as error:\n        return error\n    return None\n",
        "    except KeyError:\n        pass\n    return None\n",
        "unit/fleet/test_supervisor.py::test_a_full_disk_stops_no_fleet",
    ),
    _mend(
        "unchecked-packages",
        "the set-up installs a package whose content nobody compares",
        "infra/dev/setup.sh",
        "install --require-hashes --requirement infra/lock/services.txt",
        "install --requirement infra/lock/services.txt",
        "unit/infra/test_locks.py::test_the_set_up_installs_nothing_unchecked",
    ),
    _mend(
        "unchecked-image",
        "the image installs a package whose content nobody compares",
        "infra/container/Dockerfile",
        "python -m pip install --require-hashes --no-deps --no-build-isolation --requirement infra/lock/services.txt",
        "python -m pip install --no-deps --no-build-isolation --requirement infra/lock/services.txt",
        "unit/infra/test_container.py::test_packages_are_pinned",
    ),
    _mend(
        "jars-checked-once",
        "a jar that was altered since it was fetched is used",
        "services/core/jvm/jars.py",
        '        verify(jars, folder, f"Try: find out who changed {folder}, then remove it. It is fetched again.")\n',
        "        pass\n",
        "unit/test_jvm_jars.py::test_what_was_fetched_is_checked_again_at_each_start",
    ),
    _mend(
        "redriven-never-missing",
        "a dead letter that was redriven and lost afterwards reads as dead for ever",
        "services/observer/ledger/retry_tracker.py",
        '{"parked": self.held, "redriven": self.held, "dead": self.dead}',
        '{"parked": self.held, "redriven": self.dead, "dead": self.dead}',
        "unit/observer/ledger/test_held.py::test_what_was_redriven_and_is_lost_then_is_missing",
    ),
)

KAFKA = (
    _mend(
        "code-unknown",
        "a produce answer with another code than the usual ones is taken for a refusal",
        f"{_KAFKA}/error_codes.py",
        "        return BrokerError(text)\n    return OutcomeUnknown(text)\n",
        "        return BrokerError(text)\n    return Unavailable(text)\n",
        "unit/kafka/test_produce_histories.py::test_what_is_acknowledged_is_stored_once_and_what_is_refused_is_not",
        is_long=True,
    ),
    Mend(
        "old-generation-commits",
        "a commit that waited while the group rebalanced is sent under the next generation, and moves the next owner",
        (
            Change(
                f"{_KAFKA}/aiokafka_internals.py",
                "        if not generation.member or generation_of(client) != generation:\n",
                "        generation = generation_of(client)\n        if not generation.member:\n",
            ),
        ),
        "tests/unit/kafka/test_group_model.py::test_commits_are_sound_whatever_the_group_does",
        is_long=True,
    ),
    _mend(
        "commit-goes-back",
        "a commit goes back within one ownership, and what is behind it is delivered again",
        f"{_KAFKA}/assignment.py",
        "            source: max(offset + 1, self.requested.get(source, 0))\n",
        "            source: offset + 1\n",
        "unit/kafka/test_assignment.py::test_a_commit_never_goes_back_within_one_ownership",
    ),
    _mend(
        "unread-committed",
        "on Kafka, an offset that this ownership has not read is committed",
        f"{_KAFKA}/assignment.py",
        "if source in self.owned and self._begun_at(source) <= offset + 1 <= self.next_read.get(source, -1)",
        "if source in self.owned",
        "unit/kafka/test_assignment.py::test_commits_of_what_was_not_read_are_refused",
    ),
    _mend(
        "ahead-in-all",
        "members of one process read ahead without a common bound",
        f"{_KAFKA}/aiokafka_internals.py",
        "        elif self._budget.is_spent:\n",
        "        elif False:\n",
        "unit/kafka/test_reading_state.py::test_all_members_of_a_process_share_a_budget",
    ),
)

KINESIS = (
    _mend(
        "child-settled-now",
        "what expired in a child shard before it was seen passes in silence",
        f"{_KINESIS}/leases.py",
        "settled = max((_open_until(row) for row in before or rows), default=begun_ms)",
        "settled = now_ms",
        "unit/kinesis/test_membership.py::test_a_child_counts_from_when_its_parents_were_open",
    ),
    _mend(
        "longer-retention-hides",
        "a retention that is raised hides what expired before",
        f"{_KINESIS}/shard_reader.py",
        "        self._shortest = min(self._shortest, self._held.retention)\n",
        "        self._shortest = self._held.retention\n",
        "unit/kinesis/test_shard_reader.py::test_a_longer_retention_brings_nothing_back",
    ),
    _mend(
        "closed-shard-believed",
        "a closed shard counts as read when the service says 0 ms behind, though it has more",
        f"{_KINESIS}/shard_source.py",
        "iterator = answer.next if answer.millis_behind or self.is_closed else None",
        "iterator = answer.next if answer.millis_behind else None",
        "unit/kinesis/test_look.py::test_a_closed_shard_is_measured_to_its_end",
    ),
    _mend(
        "local-clock",
        "the service's times are compared with the local clock",
        f"{_KINESIS}/incarnation.py",
        "return time.time_ns() // 1_000_000 if self._ahead_ms is None else",
        "return time.time_ns() // 1_000_000 if True else",
        "unit/kinesis/test_service_clock.py::test_times_are_the_services_and_never_ahead_of_it",
    ),
    _mend(
        "memory-of-each",
        "the readers of a process have no common bound",
        f"{_KINESIS}/prefetch.py",
        "        return self.used + size <= limit or self.used == 0\n",
        "        return True\n",
        "unit/kinesis/test_read_budget.py::test_all_readers_share_one_bound",
    ),
    _mend(
        "memory-as-stored",
        "records count as they are stored, not as they are held",
        f"{_KINESIS}/record_format.py",
        "offsets, memory = range(first, first + len(records)), _memory(len(data), records)",
        "offsets, memory = range(first, first + len(records)), len(data)",
        "unit/kinesis/test_read_budget.py::test_memory_is_counted_decoded",
    ),
    _mend(
        "tag-after-the-change",
        "the autoscaler reshards a stream that never had the tag: half of the keys move",
        f"{_KINESIS}/resharding.py",
        "        await self._tag(topic)\n        async with bounded",
        "        async with bounded",
        "unit/kinesis/test_streams.py::test_an_untagged_stream_gets_its_tag_before_our_first_change",
    ),
    _mend(
        "pace-eats-the-put",
        "the wait for a shard's pace takes the time of the put, which is then sent twice",
        f"{_KINESIS}/appender.py",
        "        leave_by = deadline - min(self._timing.request, _ANSWER_SHARE * timeout)\n",
        "        leave_by = deadline\n",
        "unit/kinesis/test_appender.py::test_a_wait_for_the_shard_leaves_time_for_the_answer",
    ),
    _mend(
        "second-copies",
        "the second copy of a put that was repeated is delivered",
        f"{_KINESIS}/prefetch.py",
        "        return first < sequence\n",
        "        return False\n",
        "unit/kinesis/test_copies.py::test_one_owner_returns_each_named_append_once",
    ),
    Mend(
        "operators-split-merged",
        "an operator's split that comes while the autoscaler works is merged again",
        (
            Change(
                "services/autoscaler/shards/resharding.py",
                "        self.splits = [cut for cut in wanted if cut not in before]\n",
                "        self.splits, self.wanted = [cut for cut in wanted if cut not in before], wanted\n",
            ),
            Change(
                "services/autoscaler/shards/resharding.py",
                "{cut: kept for cut, kept in self.merges.items() if layout.count(cut) > kept}",
                "{cut: int(cut in self.wanted) for cut in layout if layout.count(cut) > (cut in self.wanted)}",
            ),
        ),
        "tests/unit/autoscaler/test_shard_acting.py::test_what_an_operator_splits_meanwhile_stays",
    ),
    _mend(
        "idle-query-ends",
        "a query on Kinesis that was idle for longer than the retention fails for ever after a crash",
        "spark/sources/shards.py",
        "return known._replace(next=at, begun=batches[0].offsets[0] if batches else known.begun)",
        "return known._replace(next=at)",
        "spark/test_shards.py::test_a_batch_that_followed_an_idle_retention_is_read_again",
    ),
    _mend(
        "longer-retention-hides-from-spark",
        "a query on Kinesis does not notice what expired before the retention was raised",
        "spark/sources/shards.py",
        "return self._replace(retention=min(self.retention or retention_ms, retention_ms))",
        "return self._replace(retention=retention_ms)",
        "spark/test_shards.py::test_a_longer_retention_brings_nothing_back",
    ),
)

SPARK = (
    _mend(
        "same-batch-for-ever",
        "a batch that ends the process is computed again, whole, by the next one",
        f"{_SPARK}/attempts.py",
        "        if attempt.ended >= limit and not",
        "        if attempt.ended < 0 and not",
        "spark/test_parts.py::test_killers_are_found_and_the_rest_is_done_once",
    ),
    _mend(
        "java-lives-on",
        "Java that has no memory left goes on and does nothing",
        "spark/session.py",
        '    "-XX:+ExitOnOutOfMemoryError",',
        '    "-XX:-ExitOnOutOfMemoryError",',
        "spark/test_java.py::test_session",
        is_long=True,
    ),
    _mend(
        "too-much-is-no-end",
        "an event whose output is too much is tried for ever",
        f"{_SPARK}/culprits.py",
        "        except TooMuch as error:\n            return str(error)\n",
        "        except TooMuch:\n            return None\n",
        "spark/test_culprits.py::test_what_is_too_much_for_a_trial_is_tried_in_parts",
    ),
    _mend(
        "no-fresh-java",
        "a pipe whose Java is spoilt never gets a fresh one while another pipe works",
        "spark/health.py",
        "        if needs_java or (wanted",
        "        if (wanted",
        "spark/test_health.py::test_one_pipe_gets_a_fresh_java",
    ),
    _mend(
        "stuck-is-alive",
        "a batch that makes no progress is a sign of life",
        "spark/health.py",
        "SLOW = 0.2\n",
        "SLOW = 20.0\n",
        "spark/test_too_much.py::test_a_batch_without_progress",
    ),
    _mend(
        "changed-state-taken",
        "a changed transform over several events goes on with the state of the former one",
        f"{_SPARK}/start_checks.py",
        "        return refuse_plan(prepared, found.plan)\n",
        "        return None\n",
        "spark/test_watermark.py::test_another_transform_does_not_go_on_with_the_state",
        is_long=True,
    ),
)

MENDS: tuple[Mend, ...] = (*HTTP, *MACHINE, *KAFKA, *KINESIS, *SPARK)
"""All names differ from those in `patches.PATCHES`."""


def run_without(mend: Mend) -> tuple[bool, str]:
    """Whether the test fails without the mend, and what pytest said last. Blocking: up to minutes.

    Raises RuntimeError when no test ran: then the patch proves nothing.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-without-") as scratch:
        copy = Path(scratch) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        (copy / ".venv").symlink_to(ROOT / ".venv")
        for change in mend.changes:
            path = copy / change.file
            path.write_text(change.apply(path.read_text()))
        status, said = _run_pytest(copy, mend.test, _LONG_LIMIT_S if mend.is_long else _LIMIT_S)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    if status not in (None, 0, _FAILED):
        raise RuntimeError(f"{mend.name}: pytest ended with {status}: {said[-4000:]}")
    return status != 0, last.strip("= ") if status is not None else "did not end"


def _run_pytest(folder: Path, test: str, limit_s: float) -> tuple[int | None, str]:
    """The status, None when it did not end in time, and what it wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--reruns", "0", "-p", "no:cacheprovider", test]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", VARIABLE: "all"}
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, cwd=folder, env=environ, start_new_session=True
        )
        try:
            status = running.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # with what the test has started
            running.wait()
        said.seek(0)
        return status, said.read()
