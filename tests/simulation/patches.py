"""Mends whose faults histories find. Those of readers: `readers/patches.py`. Those that no history shows: `tested_mends.py`."""

from tests.simulation.patch import Change, Patch
from tests.simulation.readers.patches import READERS

FLEET = (
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
        quick=620,
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
        quick=26,
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
        (Change("services/expel/pause.py", "                self._dispatcher.suspend()\n", "                pass\n"),),
        needs=frozenset({"pause", "order: key"}),
    ),
    Patch(
        "letter-born-old",
        "a dead letter has the event's time, and Kafka deletes it when that is older than its retention",
        (
            Change(
                "services/core/undelivered/dead_letter.py",
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
        quick=84,
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
                "services/core/security/file_watch.py",
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
                "services/fleet/up/plan.py",
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
                "services/core/control/pauses.py",
                "            if changed:\n                event, self",
                "            if changed and self.unknown is None and not sys.exc_info()[0]:\n                event, self",
            ),
            Change("services/core/control/pauses.py", "import asyncio\n", "import asyncio\nimport sys\n"),
        ),
        needs=frozenset({"pause"}),
    ),
)

_STEPS, _HOMES, _FORMER = (
    "services/fleet/migrate/steps.py",
    "services/core/control/homes.py",
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
        quick=25,
    ),
    Patch(
        "lease-not-awaited",
        "a stream is handed over while writers still write on its former broker",
        (
            Change(
                _STEPS,
                "            await asyncio.sleep(began + timing.LEASE_S + _MARGIN_S - time.monotonic())\n",
                "",
            ),
            Change(
                _STEPS,
                "            await asyncio.sleep(timing.FOLLOW_S + _MARGIN_S)  # a writer that is not frozen knows by now\n",
                "",
            ),
        ),
        quick=0,
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
    ),
    Patch(
        "move-unnoticed",
        "a member without room, whose receiver is down, does not leave a stream that moves",
        (Change("services/core/consuming.py", "            except HomeChanged:\n                raise\n", ""),),
        quick=24,
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
PATCHES = (*FLEET, *READERS, *MIGRATIONS)
