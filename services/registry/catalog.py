"""What the log says at present: schemas by id, fingerprint and GUID; subjects with their versions, levels and modes.

One id means one schema, and one schema has one id: the same fingerprint. Nothing is ever removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.registry.entries import (
    AddProtocol,
    AddSchema,
    AddVersion,
    Change,
    Deprecate,
    Entry,
    SetLevel,
    SetMode,
)

DEFAULT_LEVEL = "BACKWARD"
DEFAULT_MODE = "READWRITE"


@dataclass(slots=True)
class Schema:
    """One schema. stored: as its entry says. uses: subjects and versions that have it. number: of the entry. time: ms."""

    stored: AddSchema
    number: int
    time: int
    uses: list[tuple[str, int]] = field(default_factory=list)

    @property
    def id(self) -> int:
        """Its id, from 1."""
        return self.stored.id

    @property
    def guid(self) -> str:
        """As `guid_of`."""
        return guid_of(self.stored.fingerprint)


@dataclass(slots=True)
class Version:
    number: int
    schema: Schema
    time: int
    by: str
    protocol: str
    deprecated: bool = False
    note: str = ""


@dataclass(slots=True)
class Subject:
    """versions: in order, from 1, without a gap. level, mode: None: the default."""

    name: str
    versions: list[Version] = field(default_factory=list)
    level: str | None = None
    mode: str | None = None

    def find(self, schema_id: int) -> Version | None:
        """The newest version that has this schema."""
        return next((one for one in reversed(self.versions) if one.schema.id == schema_id), None)


@dataclass(frozen=True, slots=True)
class Protocol:
    """One version of a protocol."""

    stored: AddProtocol
    time: int


def guid_of(fingerprint: str) -> str:
    """The UUID (version 8 of RFC 9562) that clients send in headers: the beginning of the fingerprint (hex)."""
    variant = "89ab"[int(fingerprint[16], 16) & 3]
    last = f"{variant}{fingerprint[17:20]}-{fingerprint[20:32]}"
    return f"{fingerprint[:8]}-{fingerprint[8:12]}-8{fingerprint[13:16]}-{last}"


class Catalog:
    """The state after the entries that were applied."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """As before the first entry."""
        self.level, self.mode = DEFAULT_LEVEL, DEFAULT_MODE
        self.by_id: dict[int, Schema] = {}
        self.by_fingerprint: dict[str, Schema] = {}
        self.by_guid: dict[str, Schema] = {}
        self.by_sha256: dict[str, list[Schema]] = {}
        self.by_crc64: dict[str, list[Schema]] = {}
        self.subjects: dict[str, Subject] = {}
        self.protocols: dict[str, list[Protocol]] = {}
        self._highest = 0

    def apply(self, entry: Entry) -> None:
        """Apply the next entry. Passes over what does not fit to the state: then an earlier entry could not be read."""
        for change in entry.changes:
            self._apply(change, entry)

    @property
    def next_id(self) -> int:
        """The id of the next new schema."""
        return self._highest + 1

    def has_versions(self) -> Iterator[Subject]:
        """The subjects with a version, by name."""
        return (self.subjects[name] for name in sorted(self.subjects) if self.subjects[name].versions)

    def level_of(self, subject: str) -> str:
        """The level that counts for a subject."""
        found = self.subjects.get(subject)
        return self.level if found is None or found.level is None else found.level

    def mode_of(self, subject: str) -> str:
        """The mode that counts for a subject."""
        found = self.subjects.get(subject)
        return self.mode if found is None or found.mode is None else found.mode

    def _apply(self, change: Change, entry: Entry) -> None:
        match change:
            case AddSchema():
                self._add_schema(Schema(change, entry.number, entry.time))
            case AddVersion():
                self._add_version(change, entry)
            case SetLevel() | SetMode():
                self._set(change)
            case Deprecate():
                for version in self._subject(change.subject).versions:
                    if change.version in (None, version.number):
                        version.deprecated, version.note = change.deprecated, change.note
            case AddProtocol():
                self.protocols.setdefault(change.name, []).append(Protocol(change, entry.time))

    def _set(self, change: SetLevel | SetMode) -> None:
        match change:
            case SetLevel(subject=None, level=level):
                self.level = level or DEFAULT_LEVEL
            case SetLevel(subject=str(name), level=level):
                self._subject(name).level = level
            case SetMode(subject=None, mode=mode):
                self.mode = mode or DEFAULT_MODE
            case SetMode(subject=str(name), mode=mode):
                self._subject(name).mode = mode

    def _add_schema(self, schema: Schema) -> None:
        stored = schema.stored
        self.by_id[stored.id] = self.by_fingerprint[stored.fingerprint] = self.by_guid[schema.guid] = schema
        self.by_sha256.setdefault(stored.sha256, []).append(schema)
        self.by_crc64.setdefault(stored.crc64, []).append(schema)
        self._highest = max(self._highest, stored.id)

    def _add_version(self, change: AddVersion, entry: Entry) -> None:
        schema = self.by_id.get(change.id)
        if schema is None:
            return
        version = Version(change.version, schema, entry.time, entry.by, change.protocol)
        self._subject(change.subject).versions.append(version)
        schema.uses.append((change.subject, change.version))

    def _subject(self, name: str) -> Subject:
        return self.subjects.setdefault(name, Subject(name))
