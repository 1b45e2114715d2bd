"""What must hold after a `DoubtTrial`: three truths are compared, event by event.

The clients' answers: an event that was acknowledged is stored once, in the order of its client; one that was answered "not
stored" is not stored; no other is stored twice. The topics. And the reports of ingest in `penstock.telemetry`, with those that
the observer makes for a killed ingest: what they call accepted is stored, and what they call refused is not. Of each stored
event they say that it was accepted or that its outcome was unknown. What was acknowledged is accepted.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from aiokafka.record.memory_records import MemoryRecords
from pyroaring import BitMap

from services.core.broker.contract import Broker
from services.core.broker.reading import read_topic
from services.core.event import ID, ORIGIN, Origin, read_id
from services.core.ledger.report import TELEMETRY, Outcome, decode_report, unpack_numbers
from tests.faults.doubt import Client, DoubtTrial
from tests.support.fault_table import Row
from tests.support.kafka import describe_partitions
from tests.support.oracle import Fate

Stored = list[tuple[int, Origin]]
"""(number, origin) of each event of a partition, in the order of their offsets."""
Incarnation = tuple[str, str, int]
"""(topic, incarnation, partition)."""
Told = Mapping[Incarnation, Mapping[Outcome, BitMap]]

STORED_BY: tuple[Outcome, ...] = ("accepted", "unknown")
"""What a report may call a stored event."""


class Verdict:
    """complaints: what is wrong; empty when everything holds. row: of the fault table."""

    def __init__(self, trial: DoubtTrial, stored: Mapping[tuple[str, int], Stored], told: Told) -> None:
        self._trial, self._stored, self._told = trial, stored, told
        self._counts = Counter(number for events in stored.values() for number, _ in events)
        self.twice: list[int] = []
        self.complaints = [*self._compare_answers(), *self._compare_reports()]
        self.row = self._row()

    def _compare_answers(self) -> list[str]:
        ledger, wrong = self._trial.ledger, list[str]()
        for client in self._trial.clients:
            for number in client.numbers:
                found, fate = self._counts[number], Fate(ledger.fate[number])
                fits = found == 1 if fate == Fate.OBLIGED else found <= (fate == Fate.UNKNOWN)
                if fate == Fate.FORBIDDEN or not fits:
                    wrong.append(f"{_place(client)} {ledger.event_id(number)} is {fate.name} and stored {found} times")
                    self.twice += [number] if found > 1 else []
            mine = set(client.numbers)
            stored = self._stored[client.topic, client.partition]
            order = [number for number, _ in stored if number in mine and ledger.fate[number] == Fate.OBLIGED]
            if order != sorted(order):
                wrong.append(f"{_place(client)}: acknowledged events lie in another order")
        fates = Counter(Fate(fate) for fate in ledger.fate)
        if not fates[Fate.UNKNOWN] or not fates[Fate.DENIED] or not self._count_told("unknown"):
            wrong.append(f"nothing was in doubt, or nothing refused: the run proves nothing ({dict(fates)})")
        return wrong

    @property
    def accepted(self) -> int:
        """Events that the reports call so."""
        return self._count_told("accepted")

    def _count_told(self, outcome: Outcome) -> int:
        return sum(len(sets.get(outcome, ())) for sets in self._told.values())

    def _compare_reports(self) -> list[str]:
        found: dict[Incarnation, BitMap] = defaultdict(BitMap)
        acknowledged: dict[Incarnation, BitMap] = defaultdict(BitMap)
        for (topic, _), events in self._stored.items():
            for number, origin in events:
                place = topic, origin.incarnation, origin.partition
                found[place].add(origin.sequence)
                if self._trial.ledger.fate[number] == Fate.OBLIGED:
                    acknowledged[place].add(origin.sequence)
        wrong = []
        for place in found.keys() | self._told.keys():
            sets = {outcome: self._told.get(place, {}).get(outcome, BitMap()) for outcome in (*STORED_BY, "refused")}
            lies = {
                "accepted and not stored": sets["accepted"] - found[place],
                "refused and stored": sets["refused"] & found[place],
                "acknowledged and not accepted": acknowledged[place] - sets["accepted"],
                "stored and not told": untold(found[place], sets),
            }
            wrong += [f"{place}: {len(these)} {name}: {list(these[:10])}" for name, these in lies.items() if these]
        return wrong

    def _row(self) -> Row:
        trial = self._trial
        fates = Counter(Fate(fate) for fate in trial.ledger.fate)
        gaps = [later - earlier for earlier, later in zip(trial.acks, trial.acks[1:], strict=False)]
        obliged = [number for number, fate in enumerate(trial.ledger.fate) if fate == Fate.OBLIGED]
        return Row(
            fault="22 followers frozen" + (", brokers cut off" if trial.links else "") + ", equal batches",
            broker="kafka",
            acknowledged=len(obliged),
            delivered=len(self._counts),
            dead=0,
            duplicates=sum(found - 1 for found in self._counts.values()),
            sent_again=0,
            lost=sum(not self._counts[number] for number in obliged),
            recovery=trial.recovery,
            gap=max(gaps, default=None),
            peak_rss={name: round(one.peak_rss / 1e6) for name, one in trial.fleet.services.items()},
            seed=trial.seed,
            answers={
                "refused": fates[Fate.DENIED],
                "unknown": fates[Fate.UNKNOWN],
                "unknown by the reports": self._count_told("unknown"),
            }
            | {str(status): seen for status, seen in sorted(trial.answers.items())},
        )


def _place(client: Client) -> str:
    return f"{client.topic}[{client.partition}]"


def untold(found: BitMap, sets: Mapping[Outcome, BitMap]) -> BitMap:
    """Stored events of which no report says that they may be."""
    for outcome in STORED_BY:
        found = found - sets.get(outcome, BitMap())
    return found


async def read_stored(broker: Broker, topics: Sequence[str], run: str) -> dict[tuple[str, int], Stored]:
    """Everything that is in the topics, by partition. Fails at an event of somebody else."""
    found: dict[tuple[str, int], Stored] = {}
    for topic in topics:
        for partition, held in (await broker.reader.describe(topic)).items():
            events = found[topic, partition] = []
            async for batch in read_topic(broker.reader, topic, partition, held):
                for record in batch.records:
                    owner, _, number = (read_id(record) or "").rpartition("-")
                    assert owner == run, f"{topic}[{partition}] holds {record}"
                    events.append((int(number), Origin.unpack(record.header(ORIGIN) or b"")))
    return found


async def read_told(broker: Broker, topics: Sequence[str]) -> Told:
    """What the reports of ingest say of these topics."""
    told: dict[Incarnation, dict[Outcome, BitMap]] = defaultdict(dict)
    for partition, held in (await broker.reader.describe(TELEMETRY)).items():
        async for batch in read_topic(broker.reader, TELEMETRY, partition, held):
            for report in (decode_report(record.value) for record in batch.records):
                if report.node != "ingest" or report.pipe not in topics:
                    continue
                for one in (*report.sets, *report.in_doubt):
                    sets = told[report.pipe, one.incarnation, one.partition]
                    sets[one.outcome] = sets.get(one.outcome, BitMap()) | unpack_numbers(one.numbers)
    return told


async def judge(trial: DoubtTrial) -> Verdict:
    """Compare. Every ingest has ended, and the reports of those that were killed were made up for."""
    stored = await read_stored(trial.broker, trial.topics, trial.ledger.run)
    return Verdict(trial, stored, await read_told(trial.broker, trial.topics))


async def explain(trial: DoubtTrial, numbers: Sequence[int]) -> list[str]:
    """How these events got where they are twice: under which producer id and number the leader has each copy."""
    wanted = {trial.ledger.event_id(number).encode() for number in numbers}
    said = [f"strike {text}" for text in trial.strikes]
    for topic in trial.topics:
        for found in await describe_partitions(trial.cluster.bootstrap, topic):
            folder = trial.cluster.brokers[found["leader"]].data / f"{topic}-{found['partition']}"
            for path in sorted(folder.glob("*.log")):
                records = MemoryRecords(path.read_bytes())
                while records.has_next():
                    batch = records.next_batch()
                    names = {dict(record.headers).get(ID) for record in batch} & wanted
                    where = f"offset {batch.base_offset} as producer {batch.producer_id} number {batch.base_sequence}"
                    said += [f"{name!r} is stored at {where}" for name in names]
    return said
