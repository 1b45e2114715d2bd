"""Mends that can be taken out again: the simulation proves itself by finding each of these faults.

A change is the text that mends, and the text without it; it is made while the module is imported, and never on disk.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Change:
    """In this file, `mended` stands exactly once; `broken` takes its place."""

    file: str
    mended: str
    broken: str

    @property
    def module(self) -> str:
        """Its name."""
        return self.file.removesuffix(".py").replace("/", ".")

    def apply(self, text: str) -> str:
        """Raises ValueError when the mend is not there."""
        if text.count(self.mended) != 1:
            raise ValueError(f"{self.file}: {text.count(self.mended)} times instead of once: {self.mended!r}")
        return text.replace(self.mended, self.broken)


@dataclass(frozen=True, slots=True)
class Patch:
    """One mend. fault: what is broken without it. quick: whether a test run has time to find it."""

    name: str
    fault: str
    changes: tuple[Change, ...]
    quick: bool = False
    needs: frozenset[str] = frozenset()
    """Words that a history must have (`Choice.words`): no other one can notice, and is passed over."""


_BY_NAME = (
    Change(
        "services/core/broker/kafka/aiokafka_internals.py",
        "        requests = [(node, request) for node, request in by_id if request.topics]\n",
        "        requests = named\n",
    ),
    Change(
        "services/core/broker/kafka/aiokafka_internals.py",
        "        if not isinstance(request, FetchById):\n",
        "        if not isinstance(request, FetchById) and type(answer).API_KEY == 1:\n            self._observe(answer)\n"
        "        if not isinstance(request, FetchById):\n",
    ),
)
"""aiokafka's own fetch requests: topics by their names, and partitions whose position is not known yet."""

_ONE_NODE = Change("services/core/broker/kafka/cluster.py", "_ASKED = 3\n", "_ASKED = 1\n")
"""Decisions believe one node, whichever it is."""

FLEET_AND_READERS = (
    Patch(
        "doubt-forgotten",
        "a put whose answer was lost, then refused for good, is answered as not stored",
        (
            Change(
                "services/core/broker/retry.py",
                "(pending[index], in_doubt.get(pending[index], error))",
                "(pending[index], in_doubt.get(pending[index], error) if _is_retriable(error) else error)",
            ),
        ),
    ),
    Patch(
        "chunk-overtakes",
        "a later chunk is stored although one before it was refused for good",
        (
            Change(
                "services/core/broker/retry.py",
                "any(not isinstance(error, RecordTooLarge) for _, error in self.failed)",
                "any(_is_retriable(error) for _, error in self.failed)",
            ),
        ),
    ),
    Patch(
        "number-freed",
        "on Kafka, a refused repeat frees the number of a batch in doubt, and the next batch is taken for it",
        (
            Change(
                "services/core/broker/kafka/appender.py",
                "        if was_in_doubt:\n            if code",
                "        if was_in_doubt:\n            state.doubtful = ()\n            if code",
            ),
        ),
        quick=True,
        needs=frozenset({"kafka", "writers"}),
    ),
    Patch(
        "doubt-for-ever",
        "on Kafka, a batch whose number is refused for ever is sent under it for ever, and holds up its partition",
        (
            Change(
                "services/core/broker/kafka/appender.py",
                "                state.give_up_doubt()",
                "                pass",
            ),
        ),
        needs=frozenset({"kafka", "forget_producers", "writers"}),
    ),
    Patch(
        "failure-called-refusal",
        "on Kinesis, an entry that failed inside of the service, and may be stored, is answered as not stored",
        (
            Change(
                "services/core/broker/kinesis/aws.py",
                "Throttled(text) if code in _THROTTLED else OutcomeUnknown(text)",
                "Throttled(text) if code in _THROTTLED or code in _SERVICE_FAILED else OutcomeUnknown(text)",
            ),
        ),
        needs=frozenset({"kinesis", "writers"}),
    ),
    Patch(
        "old-marks",
        "marks of a stream that was deleted are committed onto the one made anew",
        (
            Change("services/core/consuming.py", "            marks = tracker.still_owned(marks)\n", ""),
            Change(
                "services/core/broker/offset_tracker.py",
                "in self.still_owned(marks).items() if source not in refused",
                "in marks.items() if source not in refused",
            ),
        ),
        needs=frozenset({"remake"}),
    ),
    Patch(
        "twin-by-place",
        "an event that comes back is taken for another one's twin, and settled unsent",
        (
            Change(
                "services/expel/dedup.py",
                "state.due, event_hash(record))",
                "state.due, 0)",
            ),
        ),
        needs=frozenset({"remake", "pause"}),
    ),
    Patch(
        "replay-without-end",
        "a replay that is resumed once more never ends, and the stream is never read again",
        (
            Change(
                "services/expel/pause.py",
                "if (newest := self._pauses.of(self._lane)) != resumed:",
                "if resumed is None and (newest := self._pauses.of(self._lane)) is not None:",
            ),
        ),
        quick=True,
    ),
    Patch(
        "stranded",
        "the last schedule is turned off, and what waits for the retrier waits for ever",
        (
            Change(
                "services/core/provision.py",
                "specs = wanted_topics(pipes, has_retrier=RETRY_IN in existing)",
                "specs = wanted_topics(pipes)",
            ),
        ),
        needs=frozenset({"schedule_off"}),
    ),
    Patch(
        "pause-in-replay",
        "a replay that is paused goes on with its retries",
        (Change("services/expel/pause.py", "                self._dispatcher.hold()\n", "                pass\n"),),
        needs=frozenset({"pause", "order: key"}),
    ),
    Patch(
        "letter-born-old",
        "a dead letter has the event's time, and Kafka deletes it when that is older than its retention",
        (
            Change(
                "services/core/dead_letter.py",
                "    return Record(record.key, record.value, now_ms, added + kept)",
                "    return Record(record.key, record.value, record.timestamp, added + kept)",
            ),
        ),
        needs=frozenset({"kafka", "dated", "400"}),
    ),
    Patch(
        "finality-of-all",
        "one destination that is behind keeps the minutes of its siblings open",
        (
            Change(
                "services/observer/ledger/finality.py",
                "        if None in waiting:\n",
                "        if waiting:\n",
            ),
        ),
        quick=True,
        needs=frozenset({"observed", "several", "order: key"}),
    ),
    Patch(
        "parked-never-missing",
        "what was parked and taken away with its topic is never missing",
        (
            Change(
                "services/observer/ledger/retry_tracker.py",
                "            self.unread[step] = unnamed & still\n",
                "            pass\n",
            ),
        ),
        needs=frozenset({"observed", "pause", "remake_inner"}),
    ),
    Patch(
        "fate-by-place",
        "a letter that lies where a redriven one lay in an earlier life of its topic reads redriven",
        (
            Change(
                "services/fleet/dead/audit.py",
                " and digest.startswith(digests[at : at + size])",
                "",
            ),
        ),
        needs=frozenset({"redrive", "remake_inner", "400"}),
    ),
    Patch(
        "unusable-for-ever",
        "a file of keys that was unusable once is never read again: a revoked key stays valid",
        (
            Change(
                "services/core/file_watch.py",
                "        try:\n            await self.load()\n        except self._expected",
                "        if self._problem is not None:\n            return\n        try:\n            await self.load()\n"
                "        except self._expected",
            ),
        ),
        needs=frozenset({"keys", "rotate_keys"}),
    ),
    Patch(
        "secrets-read-once",
        "a signing secret that was rotated is used until a restart",
        (
            Change(
                "services/expel/plan.py",
                "            watches.append(watch_secret(name, webhook.secret, folder, plan.keys))\n",
                "            pass\n",
            ),
        ),
        needs=frozenset({"signed", "rotate_secret"}),
    ),
    Patch(
        "typo-read",
        "a process that starts again reads a pipe file with a typo, and ends the whole fleet",
        (
            Change(
                "services/fleet/plan.py",
                "environ={**spec.environ, SNAPSHOT_VARIABLE: str(snapshot)}",
                "environ={**spec.environ}",
            ),
        ),
        needs=frozenset({"kill"}),
    ),
    Patch(
        "change-untold",
        "a resume that was read just before the broker failed is never acted upon",
        (
            Change(
                "services/core/pauses.py",
                "            if changed:\n                event, self",
                "            if changed and self.unknown is None and not sys.exc_info()[0]:\n                event, self",
            ),
            Change("services/core/pauses.py", "import asyncio\n", "import asyncio\nimport sys\n"),
        ),
        needs=frozenset({"pause"}),
    ),
    Patch(
        "expired-anew",
        "on Kafka, a group whose offsets have expired begins anew, and skips what waits for it",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                "expired = known.keys() - committed.keys()",
                "expired = frozenset[TopicPartition]()",
            ),
        ),
        needs=frozenset({"readers", "kafka", "away: expire_offsets", "p.late"}),
    ),
    Patch(
        "cut-unseen",
        "on Kafka, a group goes on behind its commit in a log that was cut off below it",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                "    cuts = await find_cuts(cluster, read, ids)\n",
                "    cuts: dict[TopicPartition, Any] = {}\n",
            ),
        ),
        needs=frozenset({"readers", "kafka", "away: unclean"}),
    ),
    Patch(
        "cut-without-epoch",
        "on Kafka, a second cut of a log is not noticed, when nothing was read after the first",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                "known = None if cut is None or cut.offset < first[source] else cut.epoch",
                "known = None",
            ),
        ),
        needs=frozenset({"readers", "kafka", "unclean"}),
    ),
    Patch(
        "cut-in-reading",
        "on Kafka, a member reads on in a log that was cut off below its position",
        (
            Change(
                "services/core/broker/kafka/consumer.py",
                "if before is not None and now and now[0][1] != before[1]:",
                "if before is not None and now and now[0][1] < 0:",
            ),
        ),
        needs=frozenset({"readers", "kafka", "unclean"}),
    ),
    Patch(
        "anew-unseen",
        "on Kafka, a member reads a topic that was made anew from where it was in the old one",
        (
            Change(
                "services/core/broker/kafka/consumer.py",
                "if source.topic in topics and topics[source.topic].id != read}",
                "if source.topic in topics and not read}",
            ),
            *_BY_NAME,
        ),
        needs=frozenset({"readers", "kafka", "remake"}),
    ),
    Patch(
        "read-by-name",
        "on Kafka, a node that hears no news answers for a deleted topic, and its offsets are committed onto the new one",
        _BY_NAME,
        needs=frozenset({"readers", "kafka", "remake", "isolate"}),
    ),
    Patch(
        "begun-by-name",
        "on Kafka, a node that hears no news says where a group begins in a topic that was made anew",
        (
            Change(
                "services/core/broker/kafka/offsets.py",
                "    if ids is not None:\n        led: defaultdict",
                "    if ids is None:\n        led: defaultdict",
            ),
            Change(
                "services/core/broker/kafka/offsets.py",
                "{name: ids[name] for name in names}",
                "dict.fromkeys(names, '')",
            ),
            Change(
                "services/core/broker/kafka/offsets.py",
                "if topic not in found or found[topic].id != wanted:",
                "if wanted:",
            ),
            _ONE_NODE,
        ),
        needs=frozenset({"readers", "kafka", "isolate"}),
    ),
    Patch(
        "old-commit",
        "on Kafka, a commit for a topic that was deleted counts for the one made anew",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                'if row.metadata.topic in ("", ids[source.topic])}',
                "}",
            ),
        ),
        needs=frozenset({"readers", "kafka", "remake"}),
    ),
    Patch(
        "rolled-back-read",
        "on Kafka, records of transactions that were rolled back are delivered",
        (
            Change(
                "services/core/broker/kafka/aiokafka_internals.py",
                'isolation_level="read_committed",\n    )\n\n\nasync def disconnect',
                'isolation_level="read_uncommitted",\n    )\n\n\nasync def disconnect',
            ),
        ),
        needs=frozenset({"readers", "kafka", "transact"}),
    ),
    Patch(
        "marks-are-lag",
        "on Kafka, the marks of transactions count as lag",
        (
            Change(
                "services/core/broker/kafka/offsets.py",
                "if oldest is not None:  # else",
                "if oldest is not None or offset < end[source]:  # else",
            ),
            Change(
                "services/core/broker/kafka/offsets.py",
                "max(0, now - oldest.event), oldest.stored)",
                "max(0, now - (oldest.event if oldest else now)))",
            ),
        ),
        needs=frozenset({"readers", "kafka", "transact"}),
    ),
    Patch(
        "count-erased",
        "on Kafka, an operator's commit erases the number of partitions: those that are added later begin at the latest",
        (
            Change(
                "services/core/broker/kafka/offsets.py",
                "CommitMetadata(min(counts, default=len(sources)), now)",
                "CommitMetadata(None, now)",
            ),
            Change(
                "services/core/broker/kafka/positions.py",
                "    recorded += [(source.topic, row.partitions) for source, row in begun.items()]\n",
                "",
            ),
        ),
        needs=frozenset({"readers", "kafka", "p.late", "away: grow"}),
    ),
    Patch(
        "added-at-latest",
        "on Kafka, partitions that are added later begin at the latest",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                "is_new = source.topic in replaced or source.partition >= counts[source.topic]",
                "is_new = source.topic in replaced",
            ),
        ),
        needs=frozenset({"readers", "kafka", "p.late", "grow"}),
    ),
    Patch(
        "counted-late",
        "on Kafka, a partition that is added between a group's assignment and its first position begins at the latest",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                "for topic, count in (dealt or {}).items() if topic in counts}",
                "for topic, count in (dealt or {}).items() if topic not in counts}",
            ),
        ),
        needs=frozenset({"readers", "kafka", "p.late", "grow"}),
    ),
    Patch(
        "waiting-at-latest",
        "on Kafka, a group with the start latest skips the events that wait for it",
        (
            Change(
                "services/core/broker/kafka/positions.py",
                "start_in(source.topic.removeprefix(prefix), start)",
                "start",
            ),
        ),
        needs=frozenset({"readers", "kafka", "p.late"}),
    ),
    Patch(
        "doubt-passed-over",
        "on Kafka, records that were fetched while the log was in doubt are passed over",
        (
            Change(
                "services/core/broker/kafka/consumer.py",
                "                self._seek_back()\n        return certain\n\n    def _find_suspects",
                "                pass\n        return certain\n\n    def _find_suspects",
            ),
        ),
        needs=frozenset({"readers", "kafka"}),
    ),
    Patch(
        "early-gap",
        "on Kafka, aiokafka reads on behind the mark of a transaction that was cut off, and its partition stands still",
        (
            Change(
                "services/core/broker/kafka/consumer.py",
                "        if any(own.next_read.get(source) != at for source, at in wanted.items()):\n",
                "        if not wanted:\n",
            ),
            Change(
                "services/core/broker/kafka/consumer.py",
                "self._fail({source: gap for source, gap in gaps.items() if own.next_read.get(source) == wanted[source]})",
                "self._fail(gaps)",
            ),
        ),
        needs=frozenset({"readers", "kafka", "subject: marks"}),
    ),
    Patch(
        "former-leader-believed",
        "on Kafka, a former leader that hears no news says that nothing was cut off, and what replaced it is skipped",
        (
            Change(
                "services/core/broker/kafka/offsets.py",
                "    if not epochs:\n        return\n    async for states in",
                "    if epochs or not epochs:\n        return\n    async for states in",
            ),
            _ONE_NODE,
        ),
        needs=frozenset({"readers", "kafka", "subject: depose"}),
    ),
    Patch(
        "cut-with-nothing-behind",
        "on Kafka, what a new leader stores in place of as many lost records waits until something else comes",
        (
            Change(
                "services/core/broker/kafka/consumer.py",
                "        led_anew = own.find_led_anew(newest)\n",
                "        led_anew: dict[TopicPartition, tuple[int, int]] = {}\n",
            ),
        ),
        needs=frozenset({"readers", "kafka", "subject: depose"}),
    ),
    Patch(
        "zeros-asked-for-again",
        "on Kafka, a batch that its broker cannot pass is asked for again and again, and nobody is told",
        (
            Change(
                "services/core/broker/kafka/aiokafka_internals.py",
                "if code == CORRUPT and source not in self._records:",
                "if code < 0 and source not in self._records:",
            ),
        ),
        needs=frozenset({"readers", "kafka", "subject: zeros"}),
    ),
    Patch(
        "ahead-without-bound",
        "on Kafka, a member that does not poll fetches something of each of its partitions",
        (
            Change(
                "services/core/broker/kafka/aiokafka_internals.py",
                "        if waiting >= AHEAD_BYTES:\n",
                "        if waiting < 0:\n",
            ),
        ),
        needs=frozenset({"readers", "kafka", "subject: bulk"}),
    ),
    Patch(
        "poll-without-bound",
        "on Kafka, one poll returns whatever the member holds",
        (
            Change(
                "services/core/broker/kafka/aiokafka_internals.py",
                "            if size >= POLL_BYTES:\n",
                "            if size < 0:\n",
            ),
        ),
        needs=frozenset({"readers", "kafka", "subject: bulk"}),
    ),
    Patch(
        "waits-go-on",
        "the waits between joins grow on after a membership that was reached, unless it ends cleanly",
        (
            Change(
                "services/core/consuming.py",
                "                self._retry.reset()\n                self.waits_for = None\n",
                "                self.waits_for = None\n",
            ),
            Change(
                "services/core/consuming.py",
                "                    self.is_drained = await membership.run(consumer, stopping, drain)\n",
                "                    self.is_drained = await membership.run(consumer, stopping, drain)\n"
                "                    self._retry.reset()\n",
            ),
        ),
        needs=frozenset({"readers", "kafka", "subject: odd"}),
    ),
    Patch(
        "accepted-when-revoked",
        "what a poll returns while its partition is revoked is accepted, and settled under the next ownership",
        (
            Change(
                "services/core/consuming.py",
                "            self._revoked = set(self._being_revoked)",
                "            self._revoked.clear()",
            ),
        ),
        needs=frozenset({"readers", "kafka"}),
    ),
    Patch(
        "failures-untold",
        "joins that fail again and again are told once",
        (
            Change(
                "services/core/consuming.py",
                "if self._retry.failures & (self._retry.failures - 1) == 0:",
                "if self._retry.failures == 1:",
            ),
        ),
        needs=frozenset({"readers"}),
    ),
    Patch(
        "paused-for-ever",
        "on Kafka, a partition that is paused while its topic is made anew is never read again",
        (
            Change(
                "services/core/broker/kafka/consumer.py",
                "                elif source not in own.paused:  # it",
                "                elif not own.owned:  # it",
            ),
        ),
        needs=frozenset({"readers", "kafka", "remake"}),
    ),
    Patch(
        "children-first",
        "on Kinesis, a child shard is read before its parents are processed",
        (
            Change(
                "services/core/broker/kinesis/leases.py",
                "or any(number not in known or not known[number].is_done for number in parents)",
                "or not listed",
            ),
            Change(
                "services/core/broker/kinesis/leases.py",
                "if not row.is_done and all(every[row.stream, p].is_done for p in row.parents if (row.stream, p) in every)",
                "if not row.is_done",
            ),
        ),
        needs=frozenset({"readers", "kinesis", "split"}),
    ),
    Patch(
        "done-unprocessed",
        "on Kinesis, a closed shard that was read to its end and not processed counts as done when it is released",
        (
            Change(
                "services/core/broker/kinesis/membership.py",
                "finished = held.backlog.is_finished",
                "finished = held.backlog.ended",
            ),
        ),
        needs=frozenset({"readers", "kinesis", "split"}),
    ),
    Patch(
        "tag-believed",
        "on Kinesis, the number of partitions falls to the number of open shards when the tag is removed: keys move",
        (
            Change(
                "services/core/broker/kinesis/streams.py",
                "partitions = known.largest_tag or known.first_open_shards",
                "partitions = known.tag or open_shards",
            ),
        ),
        needs=frozenset({"readers", "kinesis", "untag"}),
    ),
    Patch(
        "anew-at-latest",
        "on Kinesis, a group with the start latest skips what arrived in a stream made anew before it noticed",
        (
            Change(
                "services/core/broker/kinesis/membership.py",
                "        if before:\n            self._report_recreated",
                "        if before and not self._topics:\n            self._report_recreated",
            ),
        ),
        needs=frozenset({"readers", "kinesis", "p.late", "remake"}),
    ),
    Patch(
        "kept-at-latest",
        "on Kinesis, a group with the start latest skips the events that wait for it",
        (
            Change(
                "services/core/broker/kinesis/membership.py",
                "start = start_in(topic, self._start)",
                "start = self._start",
            ),
        ),
        needs=frozenset({"readers", "kinesis", "p.late"}),
    ),
    Patch(
        "rows-never-there",
        "on the log, a group whose rows are lost from groups.db begins anew, and skips what waits for it",
        (
            Change(
                "services/core/broker/log/membership.py",
                "has_begun = self.group in groups",
                "has_begun = self.group in groups and not topic",
            ),
            Change(
                "services/core/broker/log/scan.py",
                "    for topic in begun:\n        _find_lost(topic, found)\n",
                "",
            ),
        ),
        needs=frozenset({"readers", "log", "p.late", "away: lose_rows"}),
    ),
)

_STEPS, _HOMES, _FORMER = (
    "services/fleet/migrate/steps.py",
    "services/core/homes.py",
    "services/fleet/migrate/former.py",
)

MIGRATIONS = (
    Patch(
        "step-of-another",
        "a step of a slow command counts after others have gone on: acknowledged events are no part of the copy",
        (
            Change(
                _STEPS,
                "MigrationStep(state, by=self._by, **content), home)",
                "MigrationStep(state, by=self._by, **content))",
            ),
        ),
        quick=True,
    ),
    Patch(
        "lease-not-awaited",
        "a stream is handed over while writers still write on its former broker",
        (
            Change(
                _STEPS,
                "            await asyncio.sleep(timing.LEASE_S + _MARGIN_S)\n            self._show",
                "            self._show",
            ),
        ),
        quick=True,
    ),
    Patch(
        "deleted-by-name",
        "a command that was frozen deletes the live topic, which has the name of the former one",
        (
            Change(
                _FORMER,
                "        if incarnation and incarnation not in live:\n",
                "        if incarnation and await incarnation_of(broker, self._stream) == incarnation not in live:\n",
            ),
            Change(_FORMER, "delete_topic(self._stream, incarnation)", "delete_topic(self._stream)"),
        ),
        quick=True,
    ),
    Patch(
        "move-unnoticed",
        "a member without room, whose receiver is down, does not leave a stream that moves",
        (Change("services/core/consuming.py", "            except HomeChanged:\n                raise\n", ""),),
        quick=True,
    ),
    Patch(
        "append-after-hand-over",
        "a writer acknowledges an append that ended after its stream was handed over",
        (
            Change(
                _HOMES,
                "        while ended > (until := self._granted_until(topic, grant.epoch)):",
                "        while (until := ended) > ended:",
            ),
        ),
    ),
)

OF_MIGRATIONS = frozenset(patch.name for patch in MIGRATIONS)
"""Their faults are found by histories of streams that move."""
PATCHES = (*FLEET_AND_READERS, *MIGRATIONS)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        for change in self._changes:
            text = change.apply(text)
        return compile(text, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, patch: Patch) -> None:
        self._changes: dict[str, list[Change]] = {}
        for change in patch.changes:
            self._changes.setdefault(change.module, []).append(change)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        changes = self._changes.get(name)
        if changes is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, changes)
        return spec


def take_out(name: str) -> None:
    """The mend of this name is not there in what is imported from now on. Raises KeyError."""
    patch = {patch.name: patch for patch in PATCHES}[name]
    sys.meta_path.insert(0, _Finder(patch))
