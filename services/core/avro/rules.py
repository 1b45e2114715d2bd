"""The rules of the comparison, by their stable ids. infra/dev/write_generated.py writes docs/schema-rules.md from this table.

An id never changes its meaning and is never removed: people's configuration and scripts name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Category(StrEnum):
    """What kind of rule it is."""

    RESOLUTION = "RESOLUTION"
    """Avro's own: the reader fails. The verdict is that of Avro's SchemaCompatibility."""
    LOGICAL = "LOGICAL"
    """Ours, stricter than Avro: the reader does not fail, and gets wrong values."""
    NOTE = "NOTE"
    """Breaks nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """summary: what the rule finds, one sentence. why: what happens to whom. remedy: what the offered fix does, or what to do.

    old, new: an example, JSON texts of two versions of a schema.
    """

    id: str
    category: Category
    summary: str
    why: str
    remedy: str
    old: str
    new: str


def _record(fields: str, name: str = "Click", rest: str = "") -> str:
    return f'{{"type": "record", "name": "{name}", "fields": [{fields}]{rest}}}'


def _note(name: str, summary: str, why: str, old: str, new: str) -> Rule:
    return Rule(name, Category.NOTE, summary, why, "", old, new)


_ID: Final = '{"name": "id", "type": "long"}'

RULES: Final[dict[str, Rule]] = {
    rule.id: rule
    for rule in (
        Rule(
            "FIELD_NEEDS_DEFAULT",
            Category.RESOLUTION,
            "The reader's record has a field that the writer's record lacks, and the field has no default.",
            "The reader has no value for the field, so it cannot read any record.",
            "A new field gets a default. A removed field, which old readers need, is put back.",
            _record(_ID),
            _record(f'{_ID}, {{"name": "page", "type": "string"}}'),
        ),
        Rule(
            "FIELD_AMBIGUOUS",
            Category.RESOLUTION,
            "A field of the reader matches several fields of the writer, by its name and its aliases.",
            "Avro refuses such a pair: its check throws.",
            "The aliases that match beside the name are removed.",
            _record('{"name": "page", "type": "string"}, {"name": "url", "type": "string"}'),
            _record('{"name": "page", "type": "string", "aliases": ["url"]}'),
        ),
        Rule(
            "TYPE_CHANGED",
            Category.RESOLUTION,
            "The reader's type cannot hold the writer's type.",
            "The reader fails at every value. Avro widens int to long, float and double, long to float and double, float to "
            "double, and reads bytes as string and string as bytes; nothing else.",
            "The earlier type is put back. For a new type add a field with a new name.",
            _record('{"name": "id", "type": "long"}'),
            _record('{"name": "id", "type": "string"}'),
        ),
        Rule(
            "TYPE_NARROWED",
            Category.RESOLUTION,
            "The reader's number type is smaller than the writer's.",
            "Avro widens numbers and never narrows them: the reader fails at every value, also at small ones.",
            "The earlier type is put back.",
            _record('{"name": "id", "type": "long"}'),
            _record('{"name": "id", "type": "int"}'),
        ),
        Rule(
            "NAME_CHANGED",
            Category.RESOLUTION,
            "A record, enum or fixed type has another name, and the reader has no alias for the writer's name.",
            "Avro matches named types by name. The namespace does not count.",
            "A new reader gets the old name as an alias. Where old readers are to read the new name, the old name is put back.",
            _record(_ID),
            _record(_ID, "Tap"),
        ),
        Rule(
            "FIXED_SIZE_CHANGED",
            Category.RESOLUTION,
            "A fixed type has another size.",
            "The reader fails at every value.",
            "The earlier size is put back.",
            '{"type": "fixed", "name": "Hash", "size": 16}',
            '{"type": "fixed", "name": "Hash", "size": 32}',
        ),
        Rule(
            "ENUM_SYMBOL_UNKNOWN",
            Category.RESOLUTION,
            "The writer's enum has symbols that the reader's enum lacks, and the reader's enum has no default.",
            "The reader fails at a value with such a symbol.",
            "Removed symbols are put back. Symbols that old readers do not know are removed. A default in the enum, before "
            "symbols are added, makes later additions compatible.",
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES", "HEARTS"]}',
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES"]}',
        ),
        Rule(
            "UNION_BRANCH_UNKNOWN",
            Category.RESOLUTION,
            "The writer's type is none of the types of the reader's union.",
            "The reader fails at a value of that type.",
            "The missing type is put back into the union, or the added type is removed.",
            _record('{"name": "id", "type": ["null", "long", "string"]}'),
            _record('{"name": "id", "type": ["null", "string"]}'),
        ),
        Rule(
            "UNION_NARROWED",
            Category.RESOLUTION,
            "The writer has a union, the reader one type, which cannot hold all types of the union.",
            "The reader fails at values of the other types, most often at null.",
            "The union is put back, or for old readers replaced by the one type that they know.",
            _record('{"name": "page", "type": ["null", "string"]}'),
            _record('{"name": "page", "type": "string"}'),
        ),
        Rule(
            "LOGICAL_TYPE_CHANGED",
            Category.LOGICAL,
            "The reader and the writer have different logical types, or the new version has one that does not fit.",
            "The bytes are read, and mean something else: milliseconds read as microseconds are times in 1970. Readers ignore a "
            "logical type that does not fit (a decimal with precision 9 and scale 12), and give plain bytes. Avro's check does "
            "not look at logical types.",
            "The earlier type is put back. For another unit add a field with a new name.",
            _record('{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}'),
            _record('{"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}}'),
        ),
        Rule(
            "DECIMAL_SCALE_CHANGED",
            Category.LOGICAL,
            "The reader's decimal has another scale than the writer's.",
            "The scale is not in the data: with scale 2 read as scale 3, 19.99 becomes 1.999.",
            "The earlier precision and scale are put back. For another scale add a field with a new name.",
            _record(
                '{"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}}'
            ),
            _record(
                '{"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3}}'
            ),
        ),
        Rule(
            "DECIMAL_PRECISION_REDUCED",
            Category.LOGICAL,
            "The reader's decimal has fewer digits than the writer's.",
            "The reader gets numbers that its type does not hold; engines refuse them or read null.",
            "The earlier precision is put back.",
            _record(
                '{"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}}'
            ),
            _record(
                '{"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 7, "scale": 2}}'
            ),
        ),
        _note(
            "FIELD_ADDED",
            "A record has a new field.",
            "Old readers pass over it. New readers take its default where a record lacks it.",
            _record(_ID),
            _record(f'{_ID}, {{"name": "page", "type": "string", "default": ""}}'),
        ),
        _note(
            "FIELD_REMOVED",
            "A record has lost a field.",
            "New readers pass over it. Old readers take its default.",
            _record(f'{_ID}, {{"name": "page", "type": "string", "default": ""}}'),
            _record(_ID),
        ),
        _note(
            "FIELD_RENAMED",
            "A field has another name, and its old name as an alias.",
            "New readers find the old field. Old readers do not find the new one, and need a default.",
            _record('{"name": "page", "type": "string", "default": ""}'),
            _record('{"name": "url", "type": "string", "default": "", "aliases": ["page"]}'),
        ),
        _note(
            "FIELD_DEFAULT_CHANGED",
            "The default of a field has changed.",
            "Readers of the two versions see different values where the field is not written.",
            _record('{"name": "count", "type": "int", "default": 0}'),
            _record('{"name": "count", "type": "int", "default": 1}'),
        ),
        _note(
            "TYPE_WIDENED",
            "A type has become one that also reads the old one: int to long, string to bytes.",
            "New readers read old data. If old readers cannot read new data, another rule says so.",
            _record('{"name": "page", "type": "string"}'),
            _record('{"name": "page", "type": "bytes"}'),
        ),
        _note(
            "NAME_MOVED",
            "A named type has another full name, and still matches.",
            "Avro compares names without the namespace, and with aliases.",
            _record(_ID),
            _record(_ID, "com.acme.Click"),
        ),
        _note(
            "ALIASES_CHANGED",
            "The aliases of a type or a field have changed.",
            "A reader needs them for data with the old names.",
            _record(_ID),
            _record(_ID, rest=', "aliases": ["Tap"]'),
        ),
        _note(
            "ENUM_SYMBOLS_ADDED",
            "An enum has new symbols.",
            "Old readers replace them by the default of their enum.",
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES"], "default": "SPADES"}',
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES", "HEARTS"], "default": "SPADES"}',
        ),
        _note(
            "ENUM_SYMBOLS_REMOVED",
            "An enum has lost symbols.",
            "New readers replace them by the default of the enum.",
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES", "HEARTS"], "default": "SPADES"}',
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES"], "default": "SPADES"}',
        ),
        _note(
            "ENUM_DEFAULT_CHANGED",
            "The default of an enum has changed.",
            "Readers of the two versions see different symbols in place of one that they lack.",
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES", "HEARTS"], "default": "SPADES"}',
            '{"type": "enum", "name": "Suit", "symbols": ["SPADES", "HEARTS"], "default": "HEARTS"}',
        ),
        _note(
            "UNION_BRANCH_ADDED",
            "A union has a new type, or a type has become a union.",
            "New readers read old data. If old readers cannot read new data, another rule says so.",
            _record('{"name": "page", "type": ["bytes", "null"]}'),
            _record('{"name": "page", "type": ["bytes", "null", "string"]}'),
        ),
        _note(
            "UNION_BRANCH_REMOVED",
            "A union has lost a type, or has become one type.",
            "Old readers read new data. If new readers cannot read old data, another rule says so.",
            _record('{"name": "page", "type": ["bytes", "null", "string"]}'),
            _record('{"name": "page", "type": ["bytes", "null"]}'),
        ),
        _note(
            "LOGICAL_TYPE_ADDED",
            "A type has got a logical type.",
            "The bytes stay the same. Readers show other values: a time in place of a number.",
            _record('{"name": "at", "type": "long"}'),
            _record('{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}'),
        ),
        _note(
            "LOGICAL_TYPE_REMOVED",
            "A type has lost its logical type.",
            "The bytes stay the same. Readers show other values: a number in place of a time.",
            _record('{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}'),
            _record('{"name": "at", "type": "long"}'),
        ),
        _note(
            "DOC_CHANGED",
            "The documentation of a type or a field has changed.",
            "The fingerprint stays the same.",
            _record(_ID),
            _record(_ID, rest=', "doc": "A click."'),
        ),
    )
}
