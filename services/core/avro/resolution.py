"""Whether a reader's schema reads what a writer's schema wrote: Avro's resolution rules, and no others.

`Resolution.reads` gives the verdict of `org.apache.avro.SchemaCompatibility` of Avro 1.12.1 (a test compares them). The work is
bounded: each pair of types is judged once, and there are at most MAX_PAIRS of them.
"""

from __future__ import annotations

from typing import Final

from services.core.avro.schema import PRIMITIVES, Array, Enum, Field, Fixed, Map, Named, Record, Schema, Union

MAX_PAIRS: Final = 200_000
MAX_DEPTH: Final = 150
PROMOTIONS: Final = {
    "long": frozenset({"int"}),
    "float": frozenset({"int", "long"}),
    "double": frozenset({"int", "long", "float"}),
    "bytes": frozenset({"string"}),
    "string": frozenset({"bytes"}),
}
"""By the reader's type, the other types that it reads."""


class TooComplex(ValueError):
    """Two schemas have too many pairs of types to compare, or are too deep. The message says what to try."""


class Resolution:
    """The verdicts of one pair of roots. Keeps those of all pairs below it."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[int, int], bool] = {}
        self._depth = 0

    def reads(self, reader: Schema, writer: Schema) -> bool:
        """Whether every value of the writer can be read. Raises TooComplex."""
        if writer.type in PRIMITIVES and reader.type in PRIMITIVES:
            return reader.type == writer.type or writer.type in PROMOTIONS.get(reader.type, ())
        pair = (id(reader), id(writer))
        known = self._verdicts.get(pair)
        if known is not None:
            return known
        if len(self._verdicts) >= MAX_PAIRS or self._depth >= MAX_DEPTH:
            raise TooComplex(
                f"The comparison needs more than {MAX_PAIRS:,} pairs of types, or {MAX_DEPTH} levels. Try: split the schema, or "
                "unions with fewer types."
            )
        # A type that contains itself is compatible unless something else in it is not.
        self._verdicts[pair] = True
        self._depth += 1
        verdict = self._compare(reader, writer)
        self._depth -= 1
        self._verdicts[pair] = verdict
        return verdict

    def _compare(self, reader: Schema, writer: Schema) -> bool:
        if reader.type != writer.type:
            if isinstance(writer, Union):
                return all(self.reads(reader, branch) for branch in writer.branches)
            if isinstance(reader, Union):
                return any(self.reads(branch, writer) for branch in reader.branches)
            return writer.type in PROMOTIONS.get(reader.type, ())
        match reader, writer:
            case Union(), Union():
                return all(self.reads(reader, branch) for branch in writer.branches)
            case Array(), Array():
                return self.reads(reader.items, writer.items)
            case Map(), Map():
                return self.reads(reader.values, writer.values)
            case Record(), Record():
                return same_name(reader, writer) and all(self._fills(item, writer) for item in reader.fields)
            case Enum(), Enum():
                return same_name(reader, writer) and not unknown_symbols(reader, writer)
            case Fixed(), Fixed():
                return same_name(reader, writer) and reader.size == writer.size
            case _:
                return True

    def _fills(self, item: Field, writer: Record) -> bool:
        sources = writer_fields(item, writer)
        if not sources:
            return item.has_default
        return len(sources) == 1 and self.reads(item.type, sources[0].type)


def same_name(reader: Named, writer: Named) -> bool:
    """Whether names match: without their namespaces, or by an alias of the reader."""
    return reader.short_name == writer.short_name or writer.name in reader.aliases


def unknown_symbols(reader: Enum, writer: Enum) -> list[str]:
    """The writer's symbols that the reader neither has nor replaces by its default."""
    if reader.default is not None:
        return []
    return sorted(set(writer.symbols).difference(reader.symbols))


def writer_fields(item: Field, writer: Record) -> list[Field]:
    """The writer's fields from which a reader's field is filled, by name and aliases. More than one is a mistake.

    So is an alias that is also the name of the field: Avro finds the writer's field twice.
    """
    fields = writer.by_name
    names = (item.name, *item.aliases) if item.aliases else (item.name,)
    return [fields[name] for name in names if name in fields]
