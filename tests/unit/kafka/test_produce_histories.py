"""The real producer and Kafka appender against a model of Kafka's leaders: hypothesis looks for one that breaks the promise.

A history sends batches, many of equal size, while nodes freeze, lose each other, lead and follow, while answers get lost or
come late, and while leaders refuse. Hours pass at once (`virtual_loop`). In the end every fault is taken back, and then:

- a record that was acknowledged is stored exactly once, and between the offsets that its answer named;
- acknowledged records of a partition lie in the order in which they were sent;
- a record whose error is not OutcomeUnknown is stored nowhere.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from services.core.broker.errors import OutcomeUnknown
from services.core.broker.kafka.appender import KafkaAppender, SequenceState
from services.core.broker.kafka.error_codes import name_of
from services.core.broker.kafka.topic_settings import TopicLimits
from services.core.broker.producer import Producer, SendResult
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from tests.support.cpu_budget import CpuBudget, report_cases
from tests.support.kafka_leader import (
    DUPLICATE,
    NOT_ENOUGH_REPLICAS,
    OLD_EPOCH,
    OUT_OF_ORDER,
    REMEMBERED,
    UNKNOWN_PRODUCER,
)
from tests.support.kafka_wire import LINKS, TOPIC, ModelCluster
from tests.support.turns import cases_of_the_day
from tests.support.virtual_loop import VirtualLoop, virtual_clock

pytestmark = pytest.mark.long

PARTS, RUNS, EXAMPLES = 10, 5, 100
"""5,000 histories, as far as the CPU seconds go. hypothesis remembers all that one run has tried: many runs take less memory than
one."""
CPU_S = 80.0
STEPS = 14
PARTITIONS = 2
POLICY = AppendPolicy()
LONGEST = POLICY.deadline + POLICY.append_timeout + 0.1
"""Seconds that one call may take."""
_SETTLED = 45.0
"""Seconds after which nothing is on its way any more, not even what a broken connection held back."""
_EXPIRED = 100_000.0
_SMALL, _USUAL = 100, 1 << 20

REFUSED = (
    *(2, 3, 5, 6, 10, 17, 18, 19, 21, 29, 31, 32, 42, 43, OLD_EPOCH, 48, 49, 51, 53, 56),
    *(72, 74, 75, 76, 87, 89, 90, 100, 103, 120, -1),
)
"""Codes with which a leader, or a node that takes itself for one, may refuse before it appends. Those of transactions are among
them (48, 51, 53, 90, 120): no node should answer them to us."""
UNSURE = (6, 7, 20, 56, -1)
"""Codes that may come although it has appended."""
MODELLED = (OUT_OF_ORDER, DUPLICATE, OLD_EPOCH, UNKNOWN_PRODUCER)
"""Codes that come of what the model's leader remembers of a producer. 46 comes only so: it says that the batch is stored."""
DOCUMENTED = {
    2: "CORRUPT_MESSAGE",
    3: "UNKNOWN_TOPIC_OR_PARTITION",
    6: "NOT_LEADER_OR_FOLLOWER",
    7: "REQUEST_TIMED_OUT",
    10: "MESSAGE_TOO_LARGE",
    17: "INVALID_TOPIC_EXCEPTION",
    18: "RECORD_LIST_TOO_LARGE",
    19: "NOT_ENOUGH_REPLICAS",
    20: "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    21: "INVALID_REQUIRED_ACKS",
    29: "TOPIC_AUTHORIZATION_FAILED",
    31: "CLUSTER_AUTHORIZATION_FAILED",
    32: "INVALID_TIMESTAMP",
    43: "UNSUPPORTED_FOR_MESSAGE_FORMAT",
    45: "OUT_OF_ORDER_SEQUENCE_NUMBER",
    46: "DUPLICATE_SEQUENCE_NUMBER",
    47: "INVALID_PRODUCER_EPOCH",
    48: "INVALID_TXN_STATE",
    49: "INVALID_PRODUCER_ID_MAPPING",
    51: "CONCURRENT_TRANSACTIONS",
    53: "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    56: "KAFKA_STORAGE_ERROR",
    59: "UNKNOWN_PRODUCER_ID",
    74: "FENCED_LEADER_EPOCH",
    76: "UNSUPPORTED_COMPRESSION_TYPE",
    87: "INVALID_RECORD",
    90: "PRODUCER_FENCED",
    100: "UNKNOWN_TOPIC_ID",
    120: "TRANSACTION_ABORTABLE",
    -1: "UNKNOWN_SERVER_ERROR",
}
"""What a produce answer may carry: `ProduceResponse.java` and `ProduceResponse.json` of Kafka 4.0 (100: of 4.1), what its
producer handles or names to callbacks (`Sender`, `TransactionManager`, `Callback`), and what its broker throws before it
writes."""

nodes = st.sampled_from((1, 2, 3))
partitions = st.integers(0, PARTITIONS - 1)
moments = st.sampled_from((0.001, 0.02, 0.5, 3.0, 6.5, 9.0, 21.0))
soon = st.sampled_from((0.001, 0.006, 0.02, 0.5))


@dataclass(eq=False)
class Call:
    """One `send_to` for one partition. life: how often the topic had been made anew when it began."""

    partition: int
    values: list[bytes]
    task: "asyncio.Task[SendResult]"
    began: float
    life: int
    ended: float | None = None


class Produce(RuleBasedStateMachine):
    """One history."""

    made_by: type[KafkaAppender] = KafkaAppender

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.stack = ExitStack()
        self.stack.callback(self.loop.close)
        self.stack.enter_context(virtual_clock(self.loop))
        self.calls: list[Call] = []
        self.lives = [0] * PARTITIONS
        self.numbers = itertools.count()
        self.begin(forgetful=False)

    @initialize(forgetful=st.booleans())
    def begin(self, *, forgetful: bool) -> None:
        """An old Kafka or a new one."""
        self.model = ModelCluster(PARTITIONS, forgetful=forgetful)
        self.appender = self.made_by(self.model, TopicLimits(self.model))
        self.producer = Producer(self.appender, policy=POLICY)

    # What clients do.

    @rule(
        partition=partitions,
        count=st.sampled_from((2, 2, 2, 1, 3, 6)),
        kind=st.sampled_from(("", "", "", "!", "large")),
    )
    def send(self, partition: int, count: int, kind: str) -> None:
        """One request; its first record may be one that some topics refuse for its time or its size."""
        values = [b"%d" % next(self.numbers) for _ in range(count)]
        values[0] = {"": b"", "!": b"!", "large": b"-" * _SMALL}[kind] + values[0]
        records = [Record(b"k", value, 1) for value in values]
        task = self.loop.create_task(self.producer.send_to(TOPIC, {partition: records}))
        call = Call(partition, values, task, self.loop.time(), self.lives[partition])
        task.add_done_callback(lambda _: setattr(call, "ended", self.loop.time()))
        self.calls.append(call)

    @rule(partition=partitions, moment=moments)
    def send_and_wait(self, partition: int, moment: float) -> None:
        """Two records, and time for them."""
        self.send(partition, 2, "")
        self.wait(moment)

    @rule(which=st.integers(0, 100))
    def hang_up(self, which: int) -> None:
        """A client does not wait any longer."""
        running = [call for call in self.calls if not call.task.done()]
        if running:
            running[which % len(running)].task.cancel()

    @rule(moment=moments)
    def wait(self, moment: float) -> None:
        """Time passes."""
        self.loop.run_until_complete(asyncio.sleep(moment))

    # What usually comes in a row.

    @rule(
        partition=partitions, unsure=st.sampled_from(UNSURE), refusal=st.sampled_from(REFUSED), first=soon, then=moments
    )
    def doubt_and_refuse(self, partition: int, unsure: int, refusal: int, first: float, then: float) -> None:
        """A leader appends without saying so; the repeats it refuses, for a while."""
        leader = self.model.partitions[partition].view.leader
        if leader is not None:
            self.model.after[leader] = unsure
            self.send_and_wait(partition, first)
            self.model.after.pop(leader)
            self.model.instead[leader] = refusal
            self.wait(then)
            self.model.instead.pop(leader)

    @rule(
        partition=partitions,
        unsure=st.sampled_from(UNSURE),
        fenced=st.booleans(),
        first=soon,
        then=moments,
    )
    def doubt_and_forget(self, partition: int, unsure: int, first: float, then: float, *, fenced: bool) -> None:
        """A leader appends without saying so. It knows the repeats no longer: newer batches came, or a later epoch."""
        chosen = self.model.partitions[partition]
        leader = chosen.view.leader
        if leader is not None:
            self.model.after[leader] = unsure
            self.send_and_wait(partition, first)
            self.model.after.pop(leader)
            if fenced:
                chosen.fence_producers()
            else:
                chosen.remembered = 0
            self.wait(then)
            chosen.remembered = REMEMBERED

    @rule(partition=partitions, first=soon, then=moments)
    def lose_followers(self, partition: int, first: float, then: float) -> None:
        """A leader appends alone; it counts its followers out, and refuses until they are back."""
        chosen, nodes = self.model.partitions[partition], self.model.nodes
        pairs = {frozenset((chosen.view.leader or 0, node)) for node in nodes.names}
        nodes.cut |= pairs
        self.send_and_wait(partition, first)
        chosen.shrink()
        self.wait(then)
        nodes.cut -= pairs
        self._spread()

    @rule(partition=partitions, unsure=st.sampled_from(UNSURE), then=moments)
    def return_to_an_old_leader(self, partition: int, unsure: int, then: float) -> None:
        """A leader does not hear of its replacement. A batch in doubt goes to it, and it lacks the batches before."""
        self.send_and_wait(partition, 0.5)
        chosen, nodes = self.model.partitions[partition], self.model.nodes
        old = chosen.view.leader
        if old is None:
            return
        nodes.isolated.add(old)
        chosen.fence(old)
        new = chosen.view.leader
        if new is None or new == old:
            return
        self.model.asked = new
        self.wait(6.5)
        self.send_and_wait(partition, 0.5)
        self.model.after[new], self.model.asked = unsure, old
        self.send_and_wait(partition, then)
        self.model.after.pop(new)
        self.model.asked = None
        nodes.isolated.discard(old)
        self._spread()

    @rule()
    def heal(self) -> None:
        """Every fault ends."""
        self._heal()

    # What happens to nodes.

    @rule(node=nodes, cut_off=st.booleans())
    def freeze(self, node: int, *, cut_off: bool) -> None:
        """SIGSTOP, or no way to the controller."""
        (self.model.nodes.isolated if cut_off else self.model.nodes.frozen).add(node)

    @rule(node=nodes, hears=st.booleans())
    def thaw(self, node: int, *, hears: bool) -> None:
        """It goes on; what came meanwhile it may answer before it hears of the others."""
        self.model.nodes.frozen.discard(node)
        (self.model.nodes.isolated.discard if hears else self.model.nodes.isolated.add)(node)
        self.model.nodes.thawed.set()
        self._spread()

    @rule(first=nodes, second=nodes, whole=st.booleans())
    def cut(self, first: int, second: int, *, whole: bool) -> None:
        """Two brokers lose, or find, each other."""
        pair = frozenset((first, second))
        (self.model.nodes.cut.discard if whole else self.model.nodes.cut.add)(pair)
        self._spread()

    @rule(partition=partitions)
    def shrink(self, partition: int) -> None:
        """A leader counts out who does not follow."""
        self.model.partitions[partition].shrink()

    @rule(node=nodes)
    def fence(self, node: int) -> None:
        """The controller misses a node that stands still or is cut off."""
        if not self.model.nodes.hears(node):
            for partition in self.model.partitions:
                partition.fence(node)

    @rule(partition=partitions, node=nodes)
    def elect(self, partition: int, node: int) -> None:
        """Another leader, while the last one may be alive."""
        self.model.partitions[partition].elect(node)

    # What leaders answer, and what becomes of the answers.

    @rule(node=nodes, link=st.sampled_from((*LINKS, LINKS[0], LINKS[0])))
    def connect(self, node: int, link: str) -> None:
        """The connection to a node changes."""
        self.model.links[node] = link

    @rule(node=nodes, code=st.sampled_from((*REFUSED, None, None, None)))
    def refuse(self, node: int, code: int | None) -> None:
        """A node refuses everything, or nothing."""
        self._set(self.model.instead, node, code)

    @rule(node=nodes, code=st.sampled_from((*UNSURE, None, None)))
    def answer_after_appending(self, node: int, code: int | None) -> None:
        """A node appends, and says something else."""
        self._set(self.model.after, node, code)

    @rule(partition=partitions, size=st.sampled_from((_SMALL, _USUAL)))
    def limit(self, partition: int, size: int) -> None:
        """The topic's max.message.bytes changes."""
        self.model.partitions[partition].max_bytes = size

    @rule(partition=partitions, strict=st.booleans())
    def refuse_times(self, partition: int, *, strict: bool) -> None:
        """The topic's limits for timestamps change."""
        self.model.partitions[partition].refuses_times = strict

    @rule(given=st.booleans())
    def give_identities(self, *, given: bool) -> None:
        """Producer ids are to be had, or not."""
        self.model.identities = given

    @rule()
    def forget_producers(self) -> None:
        """Days pass, and Kafka forgets who sent what."""
        self.wait(_EXPIRED)
        for partition in self.model.partitions:
            partition.forget_producers()

    @rule(partition=partitions)
    def use_the_next_epoch(self, partition: int) -> None:
        """Somebody else uses our producer ids, with a later epoch."""
        self.model.partitions[partition].fence_producers()

    @rule(partition=partitions, batches=st.sampled_from((0, 1, REMEMBERED)))
    def remember(self, partition: int, batches: int) -> None:
        """Leaders know repeats of fewer batches, or of five again."""
        self.model.partitions[partition].remembered = batches

    @rule(partition=partitions)
    def make_anew(self, partition: int) -> None:
        """The topic is deleted and created again. What calls that had begun are told may be about the old one."""
        self.model.partitions[partition].make_anew()
        self.lives[partition] += 1

    # The end.

    def teardown(self) -> None:
        """Take back every fault, let everything settle, and judge."""
        try:
            self._heal()
            self.wait(_SETTLED)
            assert all(call.ended is not None for call in self.calls), "a call never ended"
            self.loop.run_until_complete(self.producer.close())
            for number, partition in enumerate(self.model.partitions):
                self._judge(partition.stored(), [call for call in self.calls if call.partition == number])
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.stack.close()

    def _heal(self) -> None:
        model = self.model
        model.links = dict.fromkeys(model.links, LINKS[0])
        model.instead.clear()
        model.after.clear()
        model.identities, model.asked = True, None
        for troubled in (model.nodes.frozen, model.nodes.isolated, model.nodes.cut):
            troubled.clear()
        model.nodes.thawed.set()
        for partition in model.partitions:
            partition.max_bytes, partition.refuses_times, partition.remembered = _USUAL, False, REMEMBERED
        self._spread()

    def _spread(self) -> None:
        for partition in self.model.partitions:
            partition.spread()
            if partition.view.leader is None:
                partition.elect()

    @staticmethod
    def _set(answers: dict[int, int], node: int, code: int | None) -> None:
        if code is None:
            answers.pop(node, None)
        else:
            answers[node] = code

    def _judge(self, stored: list[bytes], calls: list[Call]) -> None:
        life = self.lives[calls[0].partition] if calls else 0
        places: dict[bytes, list[int]] = {}
        for offset, value in enumerate(stored):
            places.setdefault(value, []).append(offset)
        acknowledged: list[int] = []
        for call in calls:
            assert call.ended is not None
            assert call.ended - call.began <= LONGEST, f"a call took {call.ended - call.began} s"
            if call.task.cancelled():
                continue
            (part,) = call.task.result().parts
            failed = dict(part.failed)
            for index, value in enumerate(call.values):
                found = places.get(value, [])
                if index not in failed:
                    if call.life == life:
                        assert len(found) == 1, f"{value!r} was acknowledged and is stored {len(found)} times"
                        assert part.first < 0 or part.first <= found[0] <= part.last, f"{value!r} lies elsewhere"
                        acknowledged += found
                elif not isinstance(failed[index], OutcomeUnknown):
                    assert not found, f"{value!r} was refused ({failed[index]!r}) and is stored"
        assert acknowledged == sorted(acknowledged), "acknowledged records lie in another order than they were sent"


class FreesNumbers(KafkaAppender):
    """With the fault for which the model was made: a repeat that is refused frees the number of its batch."""

    async def _send(self, target: Any, state: SequenceState, *rest: Any) -> int:
        try:
            return await super()._send(target, state, *rest)
        except OutcomeUnknown as error:
            if f"{name_of(NOT_ENOUGH_REPLICAS)}, when the batch was sent again" in str(error):
                state.doubtful = ()
            raise


class ChangesNumbers(KafkaAppender):
    """With the fault that stored batches twice: a leader that misses the number of a batch in doubt gets it under another."""

    refusal = OUT_OF_ORDER

    async def _send(self, target: Any, state: SequenceState, *rest: Any) -> int:
        try:
            return await super()._send(target, state, *rest)
        except OutcomeUnknown as error:
            if f"{name_of(self.refusal)}, when the batch was sent again" in str(error):
                state.doubtful, state.given_up = (), True
            raise


class ChangesOldEpochs(ChangesNumbers):
    """The same for a leader that has seen a later epoch."""

    refusal = OLD_EPOCH


class RepeatsDuplicates(KafkaAppender):
    """With a fault: 46 about a batch in doubt is taken for a refusal."""

    async def _send(self, target: Any, state: SequenceState, *rest: Any) -> int:
        offset = await super()._send(target, state, *rest)
        if offset < 0:
            state.give_up_doubt()
            raise OutcomeUnknown("refused")
        return offset


class ProduceFreeingNumbers(Produce):
    """One history of that appender."""

    made_by = FreesNumbers


class ProduceChangingNumbers(Produce):
    """One history of that appender."""

    made_by = ChangesNumbers


class ProduceChangingOldEpochs(Produce):
    """One history of that appender."""

    made_by = ChangesOldEpochs


class ProduceRepeatingDuplicates(Produce):
    """One history of that appender."""

    made_by = RepeatsDuplicates


def run_histories(machine: type[Produce], phases: Sequence[Phase], examples: int = EXAMPLES, number: int = 0) -> None:
    """number: of this run. In CI hypothesis makes the same histories in each run; those of two numbers differ."""
    if settings.default is not None and settings.default.derandomize:
        machine = seed(number)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            print_blob=True,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_acknowledged_is_stored_once_and_what_is_refused_is_not(
    part: int, request: pytest.FixtureRequest
) -> None:
    """If it fails, there is a history in which a 2xx is a lost event, or a "not stored" a stored one; hypothesis prints it."""
    runs, done = cases_of_the_day(range(part * RUNS, (part + 1) * RUNS)), 0
    budget = CpuBudget(CPU_S / PARTS * len(runs) / RUNS)
    for number in runs:
        if not budget.is_left:
            break
        run_histories(Produce, list(Phase), number=number)
        done += EXAMPLES
    report_cases(request, "produce requests to a model of Kafka's leaders", done, len(runs) * EXAMPLES)


def test_a_place_that_the_leader_has_forgotten_is_not_guessed() -> None:
    """If it fails, an answer names the place of some of its records as that of all: who reads up to there misses the others."""
    history = Produce()
    history.begin(forgetful=True)
    history.remember(batches=0, partition=0)
    history.limit(partition=0, size=_SMALL)
    history.doubt_and_refuse(first=0.02, partition=0, refusal=2, then=0.001, unsure=6)
    history.forget_producers()
    history.teardown()


def test_the_histories_have_every_code() -> None:
    """If it fails, leaders answer something of which no history says what becomes of the batch, or operators read a number."""
    assert not [code for code in DOCUMENTED if name_of(code).startswith("error ")]
    assert DOCUMENTED.keys() <= {*REFUSED, *UNSURE, *MODELLED}


@pytest.mark.parametrize(
    ("machine", "times"),
    [
        (ProduceFreeingNumbers, "stored [02] times"),  # by what comes first: another batch with the number, or a repeat
        (ProduceChangingNumbers, "stored [2-9] times"),
        (ProduceChangingOldEpochs, "stored [2-9] times"),
        (ProduceRepeatingDuplicates, "stored [2-9] times"),
    ],
)
def test_the_histories_find_the_faults_for_which_they_were_made(machine: type[Produce], times: str) -> None:
    """If it fails, the histories above prove nothing: they do not find an appender that gives a number to two batches, or two
    numbers to a batch."""
    with pytest.raises(AssertionError, match=f"was acknowledged and is {times}|lies elsewhere"):
        run_histories(machine, [Phase.generate], PARTS * RUNS * EXAMPLES)
