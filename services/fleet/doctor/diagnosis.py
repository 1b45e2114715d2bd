"""Findings, and their order: causes first, with the findings that they explain beneath them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from services.fleet.doctor.facts import Facts


@dataclass(frozen=True, slots=True)
class Finding:
    """what: one sentence for a person. evidence: figures, paths and lines. first: the first thing to do, a command where there is
    one. about: the parts that it concerns, as in `about`; empty: the whole fleet. runbook: in place of that of its check.

    is_note: not a fault. It may explain a symptom, and changes no exit status. past_at: when it happened last, s since the epoch;
    it may have nothing to do with the present faults. None: it is a present one.
    """

    what: str
    evidence: Sequence[str] = ()
    first: str = ""
    about: frozenset[str] = frozenset()
    runbook: str = ""
    is_note: bool = False
    past_at: float | None = None


def about(*parts: str) -> frozenset[str]:
    """The parts of a finding: a service (`expel`), an instance (`expel-1`), a pipe (`pipe shop`), a lane (`shop/crm`)."""
    return frozenset(parts)


@dataclass(frozen=True, slots=True)
class Check:
    """name: a stable word, in --json. runbook: the page of docs/runbooks. find: reads the facts and waits for nothing.

    explains: the names of checks whose findings about the same part are consequences of this one.
    """

    name: str
    runbook: str
    find: Callable[[Facts], Iterable[Finding]]
    explains: frozenset[str] = frozenset()


@dataclass(slots=True)
class Cause:
    """A finding that no other one explains, with its consequences."""

    check: Check
    finding: Finding
    symptoms: list["Cause"] = field(default_factory=list)

    @property
    def runbook(self) -> str:
        return self.finding.runbook or self.check.runbook

    def as_json(self) -> dict[str, Any]:
        return {
            "check": self.check.name,
            "what": self.finding.what,
            "evidence": list(self.finding.evidence),
            "first": self.finding.first,
            "about": sorted(self.finding.about),
            "runbook": self.runbook,
            "symptoms": [one.as_json() for one in self.symptoms],
        }


@dataclass(slots=True)
class Diagnosis:
    """causes: the most probable first. notes: no faults. unknown: what could not be looked at, and why, for a person."""

    causes: list[Cause]
    notes: list[Cause]
    unknown: list[str]
    checks: int

    @property
    def status(self) -> int:
        """The exit status: 0 nothing is wrong, 1 something is wrong, 2 nothing was found, and not all could be looked at."""
        return 1 if self.causes else 2 if self.unknown else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "causes": [cause.as_json() for cause in self.causes],
            "notes": [note.as_json() for note in self.notes],
            "unknown": self.unknown,
            "checks": self.checks,
        }


def diagnose(facts: Facts, checks: Sequence[Check]) -> Diagnosis:
    """Run the checks and order their findings. checks: in causal order: a cause before its consequences.

    A finding about the past comes after the present faults, unless it explains one of them. Of several the newest is first. A
    check that fails is named under `unknown`. The others run.
    """
    unknown = [f"{part}: {why}" for part, why in facts.unknown.items()]
    found: list[Cause] = []
    for check in checks:
        try:
            found += [Cause(check, finding) for finding in check.find(facts)]
        except Exception as error:  # a fault of a check must not hide what the others found
            unknown.append(f"the check {check.name} failed: {type(error).__name__}: {error}")
    causes: list[Cause] = []
    notes: list[Cause] = []
    seen: list[tuple[Cause, Cause]] = []  # each with the cause under which it is listed
    for one in found:
        root = next((root for earlier, root in seen if _explains(earlier, one)), None)
        seen.append((one, root or one))
        if root is not None:
            root.symptoms.append(one)
        else:
            (notes if one.finding.is_note else causes).append(one)
    causes.sort(key=_age)
    return Diagnosis(causes, notes, unknown, len(checks))


def _age(cause: Cause) -> float:
    """For the order of causes. All present ones are alike: they are in causal order."""
    at = cause.finding.past_at
    return -inf if at is None or cause.symptoms else -at


def _explains(cause: Cause, one: Cause) -> bool:
    """Whether `one`, which came later in the causal order, is a consequence of `cause`."""
    if one.check.name not in cause.check.explains or one.finding.is_note:
        return False
    mine, others = cause.finding.about, one.finding.about
    of_other_pipes = _pipes_of(mine) and _pipes_of(others) and not _pipes_of(mine) & _pipes_of(others)
    return not mine or (bool(mine & others) and not of_other_pipes)


def _pipes_of(parts: frozenset[str]) -> frozenset[str]:
    """The pipes among these parts, also those of lanes. Two findings about different pipes share only their service, so neither
    explains the other."""
    named = {part.removeprefix("pipe ") for part in parts if part.startswith("pipe ")}
    return frozenset(named | {part.partition("/")[0] for part in parts if "/" in part and " " not in part})
