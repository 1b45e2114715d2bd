"""Mends of the reading code of the backends: only histories of readers find their faults."""

from tests.simulation.patch import Change, Patch

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

READERS = (
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
                "    cuts = await find_truncations(cluster, read, ids)\n",
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
                "services/core/broker/kafka/log_check.py",
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
                "services/core/broker/kafka/log_check.py",
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
                "services/core/broker/kafka/leaders.py",
                "    if ids is not None:\n        led: defaultdict",
                "    if ids is None:\n        led: defaultdict",
            ),
            Change(
                "services/core/broker/kafka/leaders.py",
                "{name: ids[name] for name in names}",
                "dict.fromkeys(names, '')",
            ),
            Change(
                "services/core/broker/kafka/leaders.py",
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
                "services/core/broker/kafka/leaders.py",
                "if oldest is not None:  # else",
                "if oldest is not None or offset < end[source]:  # else",
            ),
            Change(
                "services/core/broker/kafka/leaders.py",
                "since = oldest.event if oldest.stored is None else oldest.stored",
                "since = now if oldest is None else oldest.event",
            ),
            Change(
                "services/core/broker/kafka/leaders.py",
                "max(0, now - since), oldest.stored)",
                "max(0, now - since))",
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
                "                self._seek_back()\n        return certain\n\n    def _seek_back",
                "                pass\n        return certain\n\n    def _seek_back",
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
                "services/core/broker/kafka/log_truncation.py",
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
                "services/core/broker/kafka/log_check.py",
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
