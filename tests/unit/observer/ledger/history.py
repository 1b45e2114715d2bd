"""Two hours of a fleet's reports by seed: losses, retries, pauses, dead letters, crashes; reports late, twice or out of order."""

import random
from collections.abc import Iterator

from pyroaring import BitMap

from services.core.ledger.fields import FieldSet, FieldStats
from services.core.ledger.report import (
    LagSet,
    Node,
    OriginSet,
    Outcome,
    Reach,
    Report,
    due_span,
    pack_numbers,
    released_span,
    since_span,
)
from services.observer.ledger.flow import Flow, PipeFlow
from tests.unit.observer.ledger.stories import MINUTE_MS, START_MS

FLOW = Flow(
    {
        "shop": PipeFlow(("orders",), True, {"crm": None, "erp": None, "copy": "copied"}, frozenset({"crm", "erp"})),
        "late": PipeFlow(("copied", "clicks"), False, {"hook": None}, frozenset({"hook"})),
    }
)
STEP_MS = 10_000
MINUTES = 12
"""In which events come in; what waits goes on for longer."""

Said = tuple[Outcome, str, int, int | None, tuple[int, int] | None]
"""outcome, incarnation, partition, minute, due."""
Event = tuple[str, str | None, str, int, int]
"""pipe, destination, incarnation, partition, number."""


class History:
    """`steps` gives, for each STEP_MS, the reports that are stored then."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._next: dict[tuple[str, int], int] = {}
        self._due: dict[int, list[Event]] = {}
        """By step: what comes back."""
        self._released: dict[int, list[tuple[str, str | None, Said, int]]] = {}
        """By step: what the retrier reports then."""
        self._said: dict[tuple[Node, str, str | None, str], dict[Said, BitMap]] = {}
        self._late: list[Report] = []

    def steps(self) -> Iterator[tuple[int, list[Report]]]:
        """(time in ms, reports) until nothing is left to say."""
        rng, step = self._rng, 0
        last = MINUTES * MINUTE_MS // STEP_MS
        while step < last or any(at < 2_000 for at in (*self._due, *self._released)):
            now = START_MS + step * STEP_MS
            for pipe, destination, said, number in self._released.pop(step, ()):
                self._say("retrier", pipe, destination, "r", said, number)
            for come in self._due.pop(step, ()):
                self._attempt(now, step, *come, attempt=2)
            if step < last:
                for stream, incarnation in (("orders", "a1"), ("orders", "b1"), ("clicks", "c1")):
                    self._accept(now, step, stream, incarnation if step < 40 or incarnation != "b1" else "b2")
            found = [*self._reports(now, step), *self._beats(now, step)]
            if rng.random() < 0.2:
                found += rng.choices(found, k=2)
            if rng.random() < 0.2:
                self._late.append(found.pop(rng.randrange(len(found))))
            if self._late and rng.random() < 0.3:
                found += self._late
                self._late = []
            rng.shuffle(found)
            yield now, found
            step += 1

    def _say(self, node: Node, pipe: str, destination: str | None, instance: str, said: Said, number: int) -> None:
        self._said.setdefault((node, pipe, destination, instance), {}).setdefault(said, BitMap()).add(number)

    def _accept(self, now: int, step: int, stream: str, incarnation: str) -> None:
        rng = self._rng
        for _ in range(rng.randrange(1, 9)):
            partition = rng.randrange(2)
            number = self._next.get((incarnation, partition), 0)
            self._next[incarnation, partition] = number + 1
            minute = (now - rng.choice((0, 0, 0, 40_000))) // MINUTE_MS
            outcome: Outcome = "refused" if rng.random() < 0.02 else "accepted"
            if rng.random() > 0.01:
                self._say(
                    "ingest", stream, None, incarnation[0], (outcome, incarnation, partition, minute, None), number
                )
            if outcome == "refused":
                continue
            if stream == "clicks":
                self._attempt(now, step, "late", "hook", incarnation, partition, number)
                continue
            chance, fate = rng.random(), ("passed", incarnation, partition, None, None)
            if chance < 0.02:
                continue
            if chance < 0.08:
                fate = ("filtered" if chance < 0.05 else "dead", incarnation, partition, None, None)
                self._say("transform", "shop", None, "t", fate, number)  # type: ignore[arg-type]
                continue
            self._say("transform", "shop", None, "t", fate, number)  # type: ignore[arg-type]
            for destination in ("crm", "erp", "copy"):
                self._attempt(now, step, "shop", destination, incarnation, partition, number)

    def _attempt(
        self,
        now: int,
        step: int,
        pipe: str,
        destination: str | None,
        incarnation: str,
        partition: int,
        number: int,
        attempt: int = 1,
    ) -> None:
        """Expel tries to deliver it; a retry, a pause or a redrive brings it back."""
        rng = self._rng
        chance = rng.random() if destination != "copy" else rng.random() ** 0.2
        origin = (incarnation, partition)

        def say(node: Node, outcome: Outcome, due: tuple[int, int] | None = None) -> None:
            instance = node[0] + str(partition) if node == "expel" else "r"
            self._say(node, pipe, destination, instance, (outcome, *origin, None, due), number)

        def come_back(after: int) -> None:
            self._due.setdefault(step + after, []).append((pipe, destination, *origin, number))

        if chance < 0.01:
            return
        if chance < 0.10 and attempt == 1:
            wait = rng.choice((1_000, 64_000, 600_000, 3_600_000))
            say("expel", "retrying", due_span(now + wait, wait))
            self._retry(step + max(1, wait // STEP_MS), (pipe, destination, *origin, number), now + wait)
            return
        if chance < 0.18:
            say("expel", "parked" if chance < 0.14 else "dead", since_span(now))
            if chance < 0.14 and rng.random() < 0.8:
                come_back(rng.randrange(3, 60))
            if chance >= 0.14 and rng.random() < 0.3:
                say("retrier", "redriven", since_span(now + 2_000))
                come_back(2 if rng.random() < 0.8 else 10_000)
            return
        say("expel", "delivered")
        if destination == "copy":
            self._attempt(now, step, "late", "hook", incarnation, partition, number)

    def _retry(self, step: int, event: Event, due: int) -> None:
        """The retrier gives it back, or up, or loses it."""
        rng, (pipe, destination, incarnation, partition, number) = self._rng, event
        if rng.random() < 0.1:
            return
        outcome: Outcome = "dead" if rng.random() < 0.05 else "released"
        span = since_span(due) if outcome == "dead" else released_span(due)
        self._released.setdefault(step, []).append(
            (pipe, destination, (outcome, incarnation, partition, None, span), number)
        )
        if rng.random() < 0.95 and outcome == "released":
            self._due.setdefault(step + 1, []).append(event)

    def _reports(self, now: int, step: int) -> Iterator[Report]:
        rng = self._rng
        said, self._said = self._said, {}
        for (node, pipe, destination, instance), sets in said.items():
            if rng.random() < 0.02:
                self._said.setdefault((node, pipe, destination, instance), {}).update(sets)  # with a later one
                continue
            packed = tuple(OriginSet(*key[:4], pack_numbers(numbers), key[4]) for key, numbers in sets.items())
            reaches = (
                tuple(Reach(one.incarnation, one.partition, step * 10 + one.partition) for one in packed[:2])
                if node == "ingest"
                else ()
            )
            yield Report(
                node=node,
                instance=instance,
                pipe=pipe,
                destination=destination,
                at_ms=now,
                behind_ms=self._behind(step, destination),
                returned_ms=0 if node == "expel" else None,
                held_ms=0 if node == "expel" else None,
                sets=packed,
                reaches=reaches,
                lags=(LagSet("e2e", now // MINUTE_MS, 3, 60, {step % 7: 2, 9: 1}),) if node == "expel" else (),
                breaker="open" if destination == "erp" and 20 <= step < 30 else "closed" if node == "expel" else None,
            )

    def _behind(self, step: int, destination: str | None) -> int:
        return 400_000 if destination == "erp" and 30 <= step < 80 else 0

    def _beats(self, now: int, step: int) -> Iterator[Report]:
        steps: list[tuple[Node, str, str | None, str]] = [
            ("ingest", "orders", None, "a"),
            ("ingest", "clicks", None, "c"),
            ("transform", "shop", None, "t"),
            *(("expel", "shop", name, f"e{part}") for name in ("crm", "erp", "copy") for part in (0, 1)),
            *(("expel", "late", "hook", f"e{part}") for part in (0, 1)),
            ("retrier", "", None, "r"),
        ]
        for node, pipe, destination, instance in steps:
            if node == "transform" and 50 <= step < 56:
                continue  # it stands still
            stats = FieldStats()
            for number in range(300):
                stats.add(None if step > 60 and number % 3 == 0 else number % (50 + step))
            yield Report(
                node=node,
                instance=instance,
                pipe=pipe,
                destination=destination,
                at_ms=now,
                behind_ms=self._behind(step, destination),
                returned_ms=0 if node == "expel" else None,
                held_ms=0 if node == "expel" else None,
                fields=(FieldSet(now // MINUTE_MS, 300, {"price": stats}),)
                if node == "ingest" and step % 6 == 0
                else (),
            )
        if step >= 40:
            gone = START_MS + 40 * STEP_MS
            yield Report(node="ingest", instance="b", pipe="orders", at_ms=gone, closed=step > 60)
            yield (
                Report(node="ingest", instance="b", pipe="orders", at_ms=now, behind_ms=0)
                if step < 41
                else Report(node="ingest", instance="b2", pipe="orders", at_ms=now, behind_ms=0)
            )
