"""Decides what a client may register, and appends it to the log.

A decision rests on the state after a certain entry. If another registry appends meanwhile, the append does not happen, and the
decision is made again from the new state. So no two processes can both believe that theirs is version 7.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec

from services.core import metrics
from services.core.avro.compatibility import Difference, Level, compatible
from services.core.avro.json_document import to_text
from services.core.avro.patch import Operation
from services.core.avro.repair import Comparison, compare, diff
from services.core.avro.resolution import TooComplex
from services.core.avro.schema import Schema as AvroSchema
from services.registry import problems
from services.registry.catalog import Catalog, Protocol, Schema, Subject, Version
from services.registry.entries import (
    AddProtocol,
    AddSchema,
    AddVersion,
    Change,
    Deprecate,
    Reference,
    SetLevel,
    SetMode,
)
from services.registry.object_log import WITHIN_S, ObjectLog
from services.registry.problems import Refused
from services.registry.schema_reader import Candidate, SchemaReader, compute, explain

LEVELS = tuple(level.value for level in Level)
MODES = ("READWRITE", "READONLY")
_SUBJECT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_RACES = 1000
_TOLD = 5
"""Differences in the text of a refusal. Its members have all of them."""
_SHOWN = 2000
"""Characters of a patch in that text."""
_CHANGED = "Somebody has changed the versions or the level meanwhile. Try again."
MAX_WAITING = 1000
"""Registrations that wait for their turn."""
_OUTCOMES = {
    problems.INCOMPATIBLE: "incompatible",
    problems.NOT_PERMITTED: "read_only",
    problems.BUSY: "failed",
}


class _Incompatible(Refused):
    """A registration is refused; its caller says why."""

    def __init__(self) -> None:
        super().__init__(problems.INCOMPATIBLE, "")


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether a schema is compatible: each difference with the number of the version. repair: one patch that ends them all."""

    differences: tuple[tuple[Difference, int | None], ...] = ()
    repair: list[Operation] | None = None

    @property
    def compatible(self) -> bool:
        """Whether nothing breaks."""
        return not self.differences

    def as_json(self) -> list[dict[str, object]]:
        """The differences, each with the version that it is about."""
        return [{**found.to_json(), "version": version} for found, version in self.differences]

    def as_text(self) -> str:
        """The first differences and the patch, for a person."""
        return " ".join(self.messages(_TOLD))

    def messages(self, most: int | None = None) -> list[str]:
        """Differences in a sentence each (where, the rule, what breaks), at most so many; then the patch."""
        said = [_describe(found, version) for found, version in self.differences[:most]]
        return said if self.repair is None else [*said, f"Fix: {_shown(self.repair)}"]


def _describe(found: Difference, version: int | None) -> str:
    where = found.path or "/"
    against = "" if version is None else f" against version {version}"
    reader = " (the earlier version is the reader)" if found.breaks == "FORWARD" else ""
    return f"{where}{against}, rule {found.rule}: {found.message.rstrip('.')}{reader}."


def _shown(patch: list[Operation]) -> str:
    text = to_text(patch)
    return f"{text}." if len(text) <= _SHOWN else f"{len(patch)} operations, which this answer has as JSON."


def check_subject(name: str) -> str:
    """The name without the prefix of the default context. Raises Refused."""
    name = name.removeprefix(":.:")
    if name.startswith(":"):
        raise Refused(
            problems.BAD_NAME, "The registry has only the default context. Try: the name without `:.context:`."
        )
    if not _SUBJECT.fullmatch(name):
        detail = "A subject has 1 to 255 letters, digits, dots, hyphens and underscores. It begins with a letter, digit or _."
        raise Refused(problems.BAD_NAME, detail)
    return name


class Registrar:
    """Reads and changes the catalogue through the log."""

    def __init__(self, catalog: Catalog, log: ObjectLog) -> None:
        self.catalog, self.log = catalog, log
        self._waiting = 0
        self._schemas = SchemaReader(catalog)

    def forget(self) -> None:
        """The catalogue was read again."""
        self._schemas.forget()

    # Schemas.

    async def read(self, text: str, references: Sequence[Reference] = (), *, normalize: bool = False) -> Candidate:
        """Parse what a client sent. Raises Refused."""
        if references and not self._schemas.knows(references):
            await self.log.refresh()
        return await compute(lambda: self._schemas.read(text, references, normalize=normalize))

    async def parsed(self, schema: Schema) -> AvroSchema:
        """A stored schema, with what it references."""
        return await compute(lambda: self._schemas.parsed(schema))

    # Registrations.

    async def find(self, candidate: Candidate) -> Schema | None:
        """The schema with the same fingerprint, which may have been registered elsewhere a moment ago."""
        found = self.catalog.by_fingerprint.get(candidate.parsed.fingerprint)
        if found is None:
            await self.log.refresh()
            found = self.catalog.by_fingerprint.get(candidate.parsed.fingerprint)
        return found

    async def register(self, subject: str, candidate: Candidate, by: str) -> Version:
        """The version that has this schema, a new one if there is none. Raises Refused, StoreUnavailable, Damaged."""
        known = self._version_of(subject, candidate)
        if known is not None:
            metrics.REGISTRY_REGISTRATIONS.labels("known").inc()
            return known

        async def decide() -> Sequence[Change]:
            if self._version_of(subject, candidate) is not None:
                return ()
            self._check_writable(subject)
            if not await self._fits(subject, candidate):
                raise _Incompatible
            return self._changes_for(subject, candidate, {})

        try:
            await self._commit_counted(decide, by)
        except _Incompatible:
            level = self.catalog.level_of(subject)
            compatibility = await self.check_compatibility(subject, candidate)
            if compatibility.compatible:
                raise Refused(problems.BUSY, _CHANGED) from None
            text = f"{subject} has the level {level}. {compatibility.as_text()}"
            more = {"differences": compatibility.as_json(), "repair": compatibility.repair}
            raise Refused(problems.INCOMPATIBLE, text, **more) from None
        version = self._version_of(subject, candidate)
        assert version is not None, subject
        return version

    async def register_protocol(
        self,
        protocol: AddProtocol,
        types: Sequence[tuple[str, Candidate]],
        by: str,
        may_change: Callable[[Protocol], bool],
        *,
        store: bool = True,
    ) -> list[Version]:
        """Register every type of a protocol under its subject, and the text: all or nothing. Raises as `register`.

        may_change: asked about the last version of the protocol, if there is one. store: False: only raise what it would raise.
        """

        async def decide() -> Sequence[Change]:
            new_ids: dict[str, int] = {}
            changes: list[Change] = []
            placed: list[tuple[str, int]] = []
            fits = True
            for subject, candidate in types:
                version = self._version_of(subject, candidate)
                if version is not None:
                    placed.append((subject, version.number))
                    continue
                self._check_writable(subject)
                fits = fits and await self._fits(subject, candidate)
                changes += self._changes_for(subject, candidate, new_ids, protocol.name)
                added = changes[-1]
                assert isinstance(added, AddVersion), subject
                placed.append((subject, added.version))
            if not fits:
                raise _Incompatible
            known = self.catalog.protocols.get(protocol.name, [])
            if known and not may_change(known[-1]):
                raise Refused(problems.NOT_PERMITTED, f"{protocol.name} has types that the key does not cover.")
            if not changes and known and known[-1].stored.sha256 == protocol.sha256:
                return ()
            stored = msgspec.structs.replace(protocol, version=len(known) + 1, types=tuple(placed))
            return [*changes, stored]

        try:
            if not store:
                await self.log.refresh()
                await decide()
                return []
            await self._commit_counted(decide, by)
        except _Incompatible:
            raise await self._refused_types(protocol.name, types) from None
        versions = [self._version_of(subject, candidate) for subject, candidate in types]
        return [version for version in versions if version is not None]

    async def _refused_types(self, protocol: str, types: Sequence[tuple[str, Candidate]]) -> Refused:
        """Each difference has its subject. `repairs` has a patch for each subject for which there is one, and the type as
        JSON, for which the patch is: the client may have sent IDL."""
        new = [(subject, candidate) for subject, candidate in types if self._version_of(subject, candidate) is None]
        checked = [(subject, await self.check_compatibility(subject, candidate)) for subject, candidate in new]
        refused = [(subject, compatibility) for subject, compatibility in checked if not compatibility.compatible]
        if not refused:
            return Refused(problems.BUSY, _CHANGED)
        told = " ".join(f"{subject}: {compatibility.as_text()}" for subject, compatibility in refused[:_TOLD])
        differences = [
            {"subject": subject, **one} for subject, compatibility in refused for one in compatibility.as_json()
        ]
        texts = {subject: candidate.text for subject, candidate in types}
        repairs = {
            subject: {"schema": texts[subject], "patch": compatibility.repair}
            for subject, compatibility in refused
            if compatibility.repair is not None
        }
        text = f"{protocol} is incompatible. {told}"
        return Refused(problems.INCOMPATIBLE, text, differences=differences, repairs=repairs)

    async def _fits(self, subject: str, candidate: Candidate) -> bool:
        """Whether it is compatible, and no more: others wait. Who is refused looks for the reasons and a patch afterwards."""
        level, found = Level(self.catalog.level_of(subject)), self.catalog.subjects.get(subject)
        existing = [] if found is None else current_versions(found)
        schemas = _Stored(existing if level.transitive else existing[-1:], self._schemas)
        try:
            return await compute(lambda: compatible(level, candidate.parsed, schemas))
        except TooComplex as error:
            raise Refused(problems.BAD_SCHEMA, str(error)) from error

    async def check_compatibility(self, subject: str, candidate: Candidate, level: str | None = None) -> Compatibility:
        """Against the versions that the level asks for. Deprecated versions do not count. Raises Refused."""
        found = self.catalog.subjects.get(subject)
        existing = [] if found is None else current_versions(found)
        return await self.compare(candidate, existing, level or self.catalog.level_of(subject))

    async def compare(self, candidate: Candidate, existing: Sequence[Version], level: str) -> Compatibility:
        """Against these versions, oldest first. Raises Refused."""
        chosen = Level(level)
        if not existing or chosen is Level.NONE:
            return Compatibility()
        counted = existing if chosen.transitive else existing[-1:]
        schemas = _Stored(counted, self._schemas)
        try:
            found = await explain(lambda: compare(chosen, candidate.parsed, schemas))
        except TooComplex as error:
            raise Refused(problems.BAD_SCHEMA, str(error)) from error
        return Compatibility(tuple((one, counted[one.against].number) for one in found.differences), found.repair)

    async def diff(self, old: AvroSchema, new: AvroSchema, level: Level) -> Comparison:
        """Everything that differs, with a patch for the level. Raises Refused."""
        try:
            return await explain(lambda: diff(old, new, level))
        except TooComplex as error:
            raise Refused(problems.BAD_SCHEMA, str(error)) from error

    # Settings.

    async def set_level(self, subject: str | None, level: str | None, by: str) -> None:
        """Set a level; None: the default applies again. Raises Refused."""
        if level is not None and level not in LEVELS:
            raise Refused(problems.BAD_LEVEL, f"The level is none of {', '.join(LEVELS)}.")
        await self._set(SetLevel(subject, level), lambda: self.own(subject, "level") == level, by)

    async def set_mode(self, subject: str | None, mode: str | None, by: str) -> None:
        """Set a mode; None: the default applies again. Raises Refused."""
        if mode is not None and mode not in MODES:
            raise Refused(problems.BAD_MODE, f"The mode is none of {', '.join(MODES)}.")
        await self._set(SetMode(subject, mode), lambda: self.own(subject, "mode") == mode, by)

    async def deprecate(self, change: Deprecate, by: str) -> None:
        """Mark versions. Raises nothing when they are marked already."""

        def is_so() -> bool:
            subject = self.catalog.subjects[change.subject]
            chosen = [one for one in subject.versions if change.version in (None, one.number)]
            return all((one.deprecated, one.note) == (change.deprecated, change.note) for one in chosen)

        await self._set(change, is_so, by)

    def own(self, subject: str | None, what: str) -> str | None:
        """The level or the mode that was set for a subject, or for all (None); None: none was."""
        holder = self.catalog if subject is None else self.catalog.subjects.get(subject)
        return None if holder is None else getattr(holder, what)

    async def _set(self, change: Change, is_so: Callable[[], bool], by: str) -> None:
        async def decide() -> Sequence[Change]:
            return () if is_so() else (change,)

        await self._commit(decide, by)

    # The log.

    async def _commit(self, decide: Callable[[], Awaitable[Sequence[Change]]], by: str) -> bool:
        """Append what `decide` returns from the newest state. False: nothing had to be appended."""
        await self._take_turn()
        try:
            for _ in range(_RACES):
                await self.log.refresh()
                self.log.check()
                after = self.log.number
                changes = await decide()
                if not changes:
                    return False
                if await self.log.append(changes, by, after):
                    return True
        finally:
            self.log.writing.release()
        raise Refused(problems.BUSY, "Other registries were always faster. Try again.")

    async def _take_turn(self) -> None:
        """Take `log.writing`. While the store does not answer, each turn may last for `WITHIN_S`. Raises Refused."""
        if self._waiting >= MAX_WAITING:
            raise Refused(problems.BUSY, f"{MAX_WAITING} registrations wait already. Try again.")
        self._waiting += 1
        try:
            async with asyncio.timeout(WITHIN_S):
                await self.log.writing.acquire()
        except TimeoutError:
            raise Refused(problems.BUSY, f"The registration had no turn within {WITHIN_S:.0f} s. Try again.") from None
        finally:
            self._waiting -= 1

    async def _commit_counted(self, decide: Callable[[], Awaitable[Sequence[Change]]], by: str) -> None:
        outcome = "failed"
        try:
            outcome = "new" if await self._commit(decide, by) else "known"
        except Refused as error:
            outcome = _OUTCOMES.get(error.kind, "invalid")
            raise
        finally:
            metrics.REGISTRY_REGISTRATIONS.labels(outcome).inc()

    def _version_of(self, subject: str, candidate: Candidate) -> Version | None:
        schema = self.catalog.by_fingerprint.get(candidate.parsed.fingerprint)
        found = self.catalog.subjects.get(subject)
        return None if schema is None or found is None else found.find(schema.id)

    def _changes_for(
        self, subject: str, candidate: Candidate, new_ids: dict[str, int], protocol: str = ""
    ) -> list[Change]:
        """new_ids: by fingerprint, the ids that earlier changes of the same entry claim."""
        parsed = candidate.parsed
        schema = self.catalog.by_fingerprint.get(parsed.fingerprint)
        changes: list[Change] = []
        schema_id = new_ids.get(parsed.fingerprint) if schema is None else schema.id
        if schema_id is None:
            schema_id = new_ids[parsed.fingerprint] = self.catalog.next_id + len(new_ids)
            changes.append(
                AddSchema(
                    schema_id,
                    parsed.fingerprint,
                    parsed.parsing_sha256,
                    f"{parsed.crc64:016x}",
                    parsed.full_name,
                    candidate.text,
                    candidate.references,
                )
            )
        found = self.catalog.subjects.get(subject)
        number = 1 if found is None else len(found.versions) + 1
        return [*changes, AddVersion(subject, number, schema_id, protocol)]

    def _check_writable(self, subject: str) -> None:
        if self.catalog.mode_of(subject) == "READONLY":
            raise Refused(problems.NOT_PERMITTED, f"The mode of {subject} is READONLY.")


def current_versions(subject: Subject) -> list[Version]:
    """The versions that count: those that are not deprecated."""
    return [version for version in subject.versions if not version.deprecated]


def latest_version(subject: Subject) -> Version | None:
    """The newest version that is not deprecated; if all are, the newest."""
    current = current_versions(subject) or subject.versions
    return current[-1] if current else None


class _Stored(Sequence[AvroSchema]):
    """The schemas of versions, each parsed when it is looked at: all of them together may be large."""

    def __init__(self, versions: Sequence[Version], schemas: SchemaReader) -> None:
        self._versions, self._schemas = versions, schemas

    def __len__(self) -> int:
        return len(self._versions)

    @overload
    def __getitem__(self, index: int) -> AvroSchema: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AvroSchema]: ...
    def __getitem__(self, index: int | slice) -> AvroSchema | Sequence[AvroSchema]:
        if isinstance(index, slice):
            return _Stored(self._versions[index], self._schemas)
        return self._schemas.parsed(self._versions[index].schema)
