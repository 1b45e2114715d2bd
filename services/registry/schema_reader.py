"""Reads schemas within bounds of time and memory: those that clients send, and stored ones with what they reference.

A schema of 1 MB takes seconds. That work has threads of its own, so neither the event loop nor the store's requests wait for it.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from services.core.avro.json_document import SchemaError, to_text
from services.core.avro.parsing import parse_schema
from services.core.avro.schema import Array, Map, Named, Record, Union
from services.core.avro.schema import Schema as AvroSchema
from services.registry import problems
from services.registry.catalog import Catalog, Schema
from services.registry.entries import Reference
from services.registry.problems import Refused

T = TypeVar("T")

MAX_REFERENCES = 100
MAX_REFERENCE_LEVELS = 20
MAX_KEPT_BYTES = 4 << 20
"""Of the texts whose parsed forms are kept. Parsed, a text takes 25 to 35 times its size."""
MAX_PROTOCOL_BYTES = 8 << 20
"""Of all types of a protocol, each written out with the types that it uses."""
MAX_COMPUTING = 100


class _Threads:
    """At most MAX_COMPUTING pieces of work run or wait."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._computing = ThreadPoolExecutor(threads, name), 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._computing >= MAX_COMPUTING:
            raise Refused(problems.BUSY, f"{MAX_COMPUTING} requests wait for work on their schemas already. Try again.")
        self._computing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._computing -= 1


_QUICK, _SLOW = _Threads(2, "schemas"), _Threads(1, "differences")


async def compute(work: Callable[[], T]) -> T:
    """Run this on one of the threads for schemas. Raises what it raises, and Refused when too many wait for a thread."""
    return await _QUICK.run(work)


async def explain(work: Callable[[], T]) -> T:
    """As `compute`, for comparisons that look for reasons and patches, which take seconds: no registration waits for these."""
    return await _SLOW.run(work)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schema that a client sent. text: as it will be stored if it is new."""

    parsed: AvroSchema
    text: str
    references: tuple[Reference, ...]


class SchemaReader:
    """Its methods work on any thread. Those that parse are for `compute`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._kept: OrderedDict[int, tuple[AvroSchema, int]] = OrderedDict()
        """By id: parsed, and the size of its text. The catalogue may be empty for a moment, when it is read again."""
        self._bytes = 0
        self._lock = threading.Lock()

    def forget(self) -> None:
        """The catalogue was read again."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def knows(self, references: Sequence[Reference]) -> bool:
        """Whether all of them were registered."""
        return all(self._find(reference) is not None for reference in references)

    def read(self, text: str, references: Sequence[Reference], *, normalize: bool) -> Candidate:
        """Parse what a client sent. Raises Refused."""
        self._check_depth(references)
        return _read(text, self._named(references), tuple(references), normalize)

    def parsed(self, schema: Schema) -> AvroSchema:
        """A stored schema, with what it references."""
        with self._lock:
            found = self._kept.get(schema.id)
            if found is not None:
                self._kept.move_to_end(schema.id)
                return found[0]
        stored = schema.stored
        parsed = parse_schema(stored.schema, named=self._named(stored.references))
        with self._lock:
            if schema.id not in self._kept:
                self._kept[schema.id] = parsed, len(stored.schema)
                self._bytes += len(stored.schema)
            while self._bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
                _, (_, size) = self._kept.popitem(last=False)
                self._bytes -= size
        return parsed

    def _find(self, reference: Reference) -> Schema | None:
        subject = self._catalog.subjects.get(reference.subject)
        if subject is None or not 1 <= reference.version <= len(subject.versions):
            return None
        return subject.versions[reference.version - 1].schema

    def _check_depth(self, references: Sequence[Reference]) -> None:
        """Reading a schema reads what it references, and so on: the levels have a bound. Raises Refused."""
        level = {found.id: found for reference in references if (found := self._find(reference)) is not None}
        for _ in range(MAX_REFERENCE_LEVELS):
            if not level:
                return
            deeper = (self._find(inner) for schema in level.values() for inner in schema.stored.references)
            level = {found.id: found for found in deeper if found is not None}
        raise Refused(
            problems.BAD_REFERENCE, f"References of references are at most {MAX_REFERENCE_LEVELS} levels deep."
        )

    def _named(self, references: Sequence[Reference]) -> Mapping[str, AvroSchema]:
        """All named types in the schemas that are referenced."""
        if len(references) > MAX_REFERENCES:
            raise Refused(problems.BAD_REFERENCE, f"A schema has at most {MAX_REFERENCES} references.")
        named: dict[str, AvroSchema] = {}
        for reference in references:
            schema = self._find(reference)
            if schema is None:
                raise no_such_reference(reference)
            for found in _named_types(self.parsed(schema)):
                named.setdefault(found.full_name, found)
        return named


def no_such_reference(reference: Reference) -> Refused:
    """Also for a subject that the client's key does not cover: it does not exist for that client."""
    target = f"version {reference.version} of {reference.subject}"
    return Refused(problems.BAD_REFERENCE, f"{reference.name} refers to {target}. Register it first.")


def read_types(types: Sequence[AvroSchema]) -> list[Candidate]:
    """The types of a protocol, each as a schema of its own. For `compute`. Raises Refused."""
    texts: list[str] = []
    left = MAX_PROTOCOL_BYTES
    for one in types:
        texts.append(to_text(one.to_json()))
        left -= len(texts[-1])
        if left < 0:
            limit = f"Its types, each written out with those that it uses, have more than {MAX_PROTOCOL_BYTES:,} bytes."
            raise Refused(problems.BAD_SCHEMA, f"{limit} Try: several protocols.")
    return [_read(text, {}, (), normalize=False) for text in texts]


def _read(text: str, named: Mapping[str, AvroSchema], references: tuple[Reference, ...], normalize: bool) -> Candidate:
    try:
        parsed = parse_schema(text, named=named)
        _ = parsed.fingerprint, parsed.parsing_sha256, parsed.crc64  # on this thread
    except SchemaError as error:
        place = {"path": error.path, "line": error.line, "column": error.column}
        raise Refused(problems.BAD_SCHEMA, str(error), **place) from error
    if normalize:
        return _read(to_text(parsed.to_json()), {}, (), normalize=False)  # as it will be read from the store
    return Candidate(parsed, text, references)


def _named_types(schema: AvroSchema) -> list[AvroSchema]:
    """Every named type in a schema, each once."""
    found: dict[str, AvroSchema] = {}
    rest = [schema]
    while rest:
        one = rest.pop()
        match one:
            case Named() if one.full_name in found:
                continue
            case Record():
                rest += [item.type for item in one.fields]
            case Array():
                rest.append(one.items)
            case Map():
                rest.append(one.values)
            case Union():
                rest += one.branches
        if isinstance(one, Named):
            found[one.full_name] = one
    return list(found.values())
