"""The broker contract on the log, with crashes between any two writes: hypothesis looks for a sequence that breaks it."""

import asyncio
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.core.broker.contract import Appended, Start, TopicSpec
from services.core.broker.errors import NotOwner, OffsetOutOfRange
from services.core.broker.log.retention import apply_retention_once
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.record import Batch, Record, TopicPartition
from tests.faults.log_disk import Disk
from tests.faults.log_host import LEASE, TOPIC, Host, Member, Moment, clock_of, machine_room
from tests.support.turns import cases_of_the_day

EXAMPLES = int(os.environ.get("PENSTOCK_MACHINE_EXAMPLES", "1000"))
OF_A_RUN = 50
"""Of those. A day does a third of the runs."""
GROUPS: dict[str, Start] = {"all": "earliest", "new": "latest"}

moments = st.none() | st.builds(Moment, st.integers(0, 12), st.booleans(), st.integers(0, 1 << 32), st.booleans())
processes = st.integers(0, 1)
members = st.integers(0, 3)


class Partition:
    """What must be in one partition: `values[offset]` from `start` on. unknown: appends whose outcome nobody was told."""

    def __init__(self) -> None:
        self.start = 0
        self.values: list[bytes] = []
        self.unknown: list[list[bytes]] = []


class Log(RuleBasedStateMachine):
    """One topic, two groups, two processes."""

    room: tuple[Path, Disk]

    def __init__(self) -> None:
        super().__init__()
        base, disk = self.room
        self.stack = ExitStack()
        path = Path(tempfile.mkdtemp(dir=base))
        self.stack.callback(shutil.rmtree, path)
        self.host = Host(path, disk)
        self.stack.enter_context(clock_of(self.host))
        self.stack.callback(self.host.close)
        self.partitions: list[Partition] = []
        self.committed: dict[str, dict[int, int]] = {group: {} for group in GROUPS}
        self.maybe: dict[str, dict[int, int]] = defaultdict(dict)
        self.begins: dict[tuple[str, int], int] = {}
        self.owners: dict[tuple[str, TopicPartition], tuple[Member, int]] = {}
        self.count = self.grown = 0
        """grown: how many partitions were acknowledged."""

    def teardown(self) -> None:
        try:
            if self.partitions:
                self.reopened()
        finally:
            self.stack.close()

    @initialize(partitions=st.integers(1, 3), retention=st.sampled_from([None, 300]), members=st.integers(0, 2))
    def create(self, partitions: int, retention: int | None, members: int) -> None:
        """A topic; and often members that have read something already."""
        spec = TopicSpec(TOPIC, partitions, retention_bytes=retention)
        self.host.run(self.host.broker(0).admin.create_topic(spec))
        self.partitions = [Partition() for _ in range(partitions)]
        self.grown = partitions
        if members:
            self.append(0, [(partition, 2) for partition in range(partitions)], None)
        for process in range(members):
            for member in [*self.host.members, self.host.join(process, "all", [TOPIC], "earliest")]:
                self.host.beat(member)
                self.one_owner()
        for member in self.host.members:
            self.read(member, 10)

    @rule(
        process=processes,
        sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3),
        moment=moments,
    )
    def append(self, process: int, sizes: list[tuple[int, int]], moment: Moment | None) -> None:
        """Several producers at once."""
        appender = self.host.broker(process).appender
        asked = []
        for partition, size in sizes:
            self.count += size
            values = [b"%d" % (self.count - n) for n in range(size)]
            asked.append((partition % len(self.partitions), values))

        async def send() -> list[Appended | BaseException]:
            sends = [appender.append(TOPIC, p, [Record(None, v, 1) for v in values], timeout=60) for p, values in asked]
            return await asyncio.gather(*sends, return_exceptions=True)

        self.host.arm(moment)
        answers = self.host.run(send())
        if self.host.crashed(moment):
            for partition, values in asked:
                self.partitions[partition].unknown.append(values)
            return self.reopened(moment)
        for (partition, values), answer in zip(asked, answers, strict=True):
            assert isinstance(answer, Appended), answer
            known = self.partitions[partition].values
            assert (answer.first, answer.last) == (len(known), len(known) + len(values) - 1)
            known += values
        return None

    @rule(process=processes, group=st.sampled_from(sorted(GROUPS)), moment=moments)
    def join(self, process: int, group: str, moment: Moment | None) -> None:
        if len(self.host.members) < 4:
            self.step(moment, lambda: self.host.join(process, group, [TOPIC], GROUPS[group]))

    @rule(which=members, moment=moments)
    def beat(self, which: int, moment: Moment | None) -> None:
        for member in self.member(which):
            self.step(moment, partial(self.host.beat, member))

    @rule(which=members)
    def freeze(self, which: int) -> None:
        """One is silent for longer than its lease; the others take over."""
        self.pass_time(LEASE + 1)
        for frozen in self.member(which):
            for member in self.host.members:
                if member is not frozen:
                    self.host.beat(member)

    @rule(which=members, moment=moments)
    def leave(self, which: int, moment: Moment | None) -> None:
        for member in self.member(which):
            self.step(moment, partial(self.host.leave, member))

    @rule(which=members)
    def die(self, which: int) -> None:
        for member in self.member(which):
            self.host.die(member)

    @rule(which=members, count=st.integers(1, 20), moment=moments)
    def poll(self, which: int, count: int, moment: Moment | None) -> None:
        for member in self.member(which):
            self.step(moment, partial(self.read, member, count))

    @rule(which=members, paused=st.booleans())
    def pause(self, which: int, paused: bool) -> None:
        for member in self.member(which):
            (member.consumer.pause if paused else member.consumer.resume)(member.consumer.assignment())

    @rule(which=members, moment=moments)
    def commit(self, which: int, moment: Moment | None) -> None:
        """What was polled, also of partitions that another one owns by now."""
        for member in self.member(which):
            if member.polled:
                self.commit_polled(member, moment)

    def commit_polled(self, member: Member, moment: Moment | None) -> None:
        processed, member.polled = member.polled, {}
        mine = {s for s in processed if self.owners.get((member.group, s), (None,))[0] is member}
        self.host.arm(moment)
        refused: set[TopicPartition] = set()
        try:
            self.host.run(member.consumer.commit(processed))
        except NotOwner as error:
            refused = {TopicPartition(*source) for source in error.partitions}
        if self.host.crashed(moment):
            self.maybe[member.group] = {source.partition: processed[source] for source in mine}
            return self.reopened(moment)
        assert refused == processed.keys() - mine
        for source in mine:
            self.committed[member.group][source.partition] = processed[source]
        return None

    @rule(process=processes, moment=moments)
    def grow(self, process: int, moment: Moment | None) -> None:
        if len(self.partitions) == 5:
            return
        self.partitions.append(Partition())
        broker = self.host.broker(process)
        crashed = self.step(moment, lambda: self.host.run(broker.admin.add_partitions(TOPIC, len(self.partitions))))
        self.grown = self.grown if crashed else len(self.partitions)
        self.pass_time(3)  # others may work with a count that is a second or two old

    @rule(moment=moments)
    def retention(self, moment: Moment | None) -> None:
        self.host.arm(moment)
        apply_retention_once(self.host.folder, self.host.clock)
        if self.host.crashed(moment):
            return self.reopened(moment)
        return self.look_at_starts()

    @rule(seconds=st.sampled_from([0.1, 2, LEASE + 1]))
    def pass_time(self, seconds: float) -> None:
        self.host.now_ns += int(seconds * 1e9)

    @rule(moment=moments)
    def restart(self, moment: Moment | None) -> None:
        """In order, or by a crash between two operations."""
        if moment is None:
            self.host.stop()
        else:
            self.host.crash(moment)
        self.reopened(moment)

    @invariant()
    def one_owner(self) -> None:
        """Of each partition of each group; and what is newly owned begins where the group is."""
        now: dict[tuple[str, TopicPartition], Member] = {}
        for member in self.host.members:
            for source in member.owned:
                assert now.setdefault((member.group, source), member) is member, f"{source} has two owners"
        for member in self.host.members:
            for source, owned in member.membership.held.items():
                before = self.owners.get((member.group, source))
                if before is None or owned.epoch > before[1]:
                    self.owners[member.group, source] = (member, owned.epoch)
                    member.polled.pop(source, None)  # of an earlier ownership: this one has polled nothing
                    self.check_begin(member.group, source.partition, owned.processed_next)

    def check_begin(self, group: str, partition: int, offset: int) -> None:
        """A group goes on behind its commit; without one, where it began when it first came."""
        committed = self.committed[group].get(partition)
        if committed is not None:
            assert offset == committed + 1
        else:
            assert self.begins.setdefault((group, partition), offset) == offset

    def read(self, member: Member, count: int) -> None:
        """Poll once; what comes must be what was stored, in order, nothing twice, nothing left out."""
        owned = member.membership.held
        before = {source: one.position for source, one in owned.items()}
        batches: list[Batch] = []
        gone: OffsetOutOfRange | None = None
        try:
            batches = self.host.run(member.consumer.poll(max_records=count, max_wait=0))
        except OffsetOutOfRange as error:
            gone = error
        if gone is not None:
            self.look_at_starts()
            assert gone.wanted < self.partitions[gone.partition].start, "no retention passed this offset"
        for batch in batches:
            known = self.partitions[batch.partition].values
            assert batch.offsets[0] == before[batch.source]
            assert [record.value for record in batch.records] == known[batch.offsets[0] : batch.offsets[-1] + 1]
            member.polled[batch.source] = batch.offsets[-1]
            before[batch.source] = batch.offsets[-1] + 1

    def step(self, moment: Moment | None, work: Callable[[], object]) -> bool:
        """Do it; a crash meanwhile is dealt with. Whether there was one."""
        self.host.arm(moment)
        work()
        if crashed := self.host.crashed(moment):
            self.reopened(moment)
        return crashed

    def member(self, which: int) -> list[Member]:
        """One of them, or none. No choice of hypothesis depends on who is there: threads make that differ between runs."""
        return [self.host.members[which % len(self.host.members)]] if self.host.members else []

    def look_at_starts(self) -> None:
        """Where retention has brought each partition: never beyond its last record."""
        for partition, held in self.host.read(TopicReader.ranges).items():
            known = self.partitions[partition]
            assert known.start <= held.start <= max(0, len(known.values) - 1)
            known.start = held.start

    def reopened(self, moment: Moment | None = None) -> None:
        """After a crash: everything acknowledged is there; what was not is there whole, once, in place, or never."""
        self.look()
        if moment is not None and moment.again:
            self.host.crash(moment._replace(power=True))
            self.look()

    def look(self) -> None:
        """What was seen once counts as acknowledged."""
        self.owners.clear()
        ranges, everything = self.host.read(lambda reader: (reader.ranges(), read_all(reader)))
        assert self.grown <= len(ranges) <= len(self.partitions)
        while len(ranges) < len(self.partitions):  # seen, and not synced: any append to it would have synced it, too
            assert not self.partitions.pop().values, "acknowledged records went with their partition"
        for partition, held in ranges.items():
            self.check_partition(self.partitions[partition], held.start, everything[partition])
            assert held.end == held.start + len(everything[partition])
        for group, acknowledged in self.committed.items():
            found = self.host.run(self.host.broker(0).admin.committed(group, TOPIC))
            for partition, offset in self.maybe.pop(group, {}).items():
                if found.get(partition) == offset:
                    acknowledged[partition] = max(offset, acknowledged.get(partition, 0))
            assert found == acknowledged

    @staticmethod
    def check_partition(known: Partition, start: int, found: list[bytes]) -> None:
        assert known.start <= start <= max(0, len(known.values) - 1), "retention took what it must keep"
        known.start = start
        kept = known.values[start:]
        assert found[: len(kept)] == kept, "acknowledged records are missing, altered or out of order"
        rest = found[len(kept) :]
        while rest:
            batch = next((batch for batch in known.unknown if batch == rest[: len(batch)]), None)
            assert batch is not None, f"{rest} was never sent, or came twice or in pieces"
            known.unknown.remove(batch)
            known.values += batch
            rest = rest[len(batch) :]
        known.unknown.clear()


def read_all(reader: TopicReader) -> dict[int, list[bytes]]:
    """The values of all records of each partition."""
    found: dict[int, list[bytes]] = {}
    for partition, held in reader.ranges().items():
        values = found[partition] = []
        while (run := reader.read(partition, held.start + len(values), 100)) is not None:
            assert list(run.offsets) == list(range(held.start + len(values), run.next))
            values += [record.value or b"" for record in run.records]
    return found


def test_the_contract_holds_over_crashes_between_any_two_writes() -> None:
    """If it fails, there is a sequence of operations and a crash after which the log breaks its word; hypothesis prints it."""
    with machine_room() as Log.room:
        for number in cases_of_the_day(range(-(-EXAMPLES // OF_A_RUN))):
            machine = type(Log.__name__, (Log,), {})
            if (
                settings.default is not None and settings.default.derandomize
            ):  # in CI, where it would make the same each time
                machine = hypothesis.seed(number)(machine)
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=OF_A_RUN,
                    stateful_step_count=16,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )


@pytest.mark.parametrize("change", range(8))
def test_what_was_read_survives_the_next_crash(change: int) -> None:
    """If it fails, a consumer commits events that the disk does not have yet, and passes over those that get their offsets."""
    for seed in range(20):
        with machine_room() as Log.room:
            log = Log()
            with log.stack:
                log.create(partitions=1, retention=None, members=0)
                log.append(process=0, sizes=[(0, 1)], moment=None)
                log.append(process=0, sizes=[(0, 1)], moment=Moment(change, power=False, seed=seed, again=True))
                log.append(process=0, sizes=[(0, 1)], moment=None)
                log.reopened()
