"""Two versions of a schema: what a level forbids, where, and which change is offered. tests/integration has Avro's verdicts."""

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.avro import repair as repairs
from services.core.avro.compatibility import Difference, Level, check, compatible
from services.core.avro.json_document import Json, SchemaError, to_text
from services.core.avro.parsing import parse_schema
from services.core.avro.patch import PatchError, apply_patch
from services.core.avro.repair import compare, diff, repair
from services.core.avro.resolution import TooComplex
from services.core.avro.schema import Schema
from tests.support.avro.pairs import pair

NULLABLE = ["null", "string"]


def record(*fields: tuple[str, Any] | tuple[str, Any, Any], name: str = "R") -> Schema:
    """A record of fields: name, type, and if there is one the default."""
    written = [
        {"name": item[0], "type": item[1], **({"default": item[2]} if len(item) == 3 else {})} for item in fields
    ]
    return parse_schema(json.dumps({"type": "record", "name": name, "fields": written}))


def changed(schema: Schema, patch: list[dict[str, Json]]) -> Schema:
    """The schema after a patch."""
    assert schema.origin is not None
    return schema.origin.again(apply_patch(schema.origin.document, patch), schema.full_name)


def only(level: Level, new: Schema, old: Schema) -> Difference:
    """The one difference."""
    [difference] = compare(level, new, [old]).differences
    return difference


@pytest.mark.parametrize(
    ("level", "refused"),
    [
        (Level.NONE, False),
        (Level.BACKWARD, True),
        (Level.BACKWARD_TRANSITIVE, True),
        (Level.FORWARD, False),
        (Level.FORWARD_TRANSITIVE, False),
        (Level.FULL, True),
        (Level.FULL_TRANSITIVE, True),
    ],
)
def test_a_level_looks_in_its_direction(level: Level, refused: bool) -> None:
    """Broken: a new required field is accepted although readers fail, or refused although nobody does."""
    old, new = record(("a", "int")), record(("a", "int"), ("b", "int"))
    assert bool(check(level, new, [old])) is refused
    assert compatible(level, new, [old]) is not refused


def test_transitive_levels_look_at_all_versions() -> None:
    """Broken: data of the first version cannot be read after the third."""
    first, second, third = record(), record(("a", "int", 0)), record(("a", "int"))
    assert check(Level.BACKWARD, third, [first, second]) == []
    [found] = check(Level.BACKWARD_TRANSITIVE, third, [first, second])
    assert (found.rule, found.path, found.against) == ("FIELD_NEEDS_DEFAULT", "/fields/0", 0)


@pytest.mark.parametrize("bad", [{"precision": 9, "scale": 12}, {"precision": 9, "scale": "2"}, {"precision": 0}, {}])
@pytest.mark.parametrize("level", [Level.BACKWARD, Level.FORWARD])
def test_a_decimal_that_has_become_invalid_is_refused(level: Level, bad: dict[str, Any]) -> None:
    """Broken: a typo in a scale makes a decimal plain bytes, in silence: readers ignore a logical type that does not fit."""
    decimal: dict[str, Any] = {"type": "bytes", "logicalType": "decimal"}
    good = record(("price", {**decimal, "precision": 9, "scale": 2}))
    found = only(level, record(("price", decimal | bad)), good)
    assert found.rule == "LOGICAL_TYPE_CHANGED"
    assert found.path == "/fields/0/type"
    assert found.fix is not None


def test_an_invalid_logical_type_may_be_corrected_or_removed() -> None:
    """Broken: a mistake that is already registered can never be mended."""
    bad: dict[str, Any] = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 12}
    for other in (bad | {"scale": 2}, bad, {"type": "bytes"}):
        assert check(Level.FULL, record(("price", other)), [record(("price", bad))]) == []


def test_a_nullable_record_is_not_the_end_of_a_path() -> None:
    """Broken: every change inside of an optional record is "the union lacks a type"."""

    def around(field: dict[str, Any]) -> Schema:
        inner = {"type": "record", "name": "Inner", "fields": [field]}
        return record(("a", {"type": "map", "values": ["null", {"type": "array", "items": ["null", inner]}]}))

    old, new = around({"name": "x", "type": "long"}), around({"name": "x", "type": "int"})
    found = only(Level.BACKWARD, new, old)
    assert found.rule == "TYPE_NARROWED"
    assert found.path == "/fields/0/type/values/1/items/1/fields/0/type"
    assert check(Level.BACKWARD, changed(new, cast(Any, found.fix)), [old]) == []


def test_optional_values_of_another_type() -> None:
    """Broken: an optional long that became an optional int has no place and no fix."""
    found = only(Level.FULL, record(("a", ["null", "int"])), record(("a", ["null", "long"])))
    assert (found.rule, found.path, found.breaks) == ("TYPE_NARROWED", "/fields/0/type/1", "BACKWARD")


def test_a_default_of_null_is_offered_with_null_first() -> None:
    """Broken: the offered default is refused by readers that take it from the first type of a union."""
    found = only(Level.BACKWARD, record(("a", ["string", "null"])), record())
    assert found.fix is not None
    written = cast(Any, changed(record(("a", ["string", "null"])), found.fix).to_json())
    assert written["fields"] == [{"name": "a", "type": ["null", "string"], "default": None}]


def test_a_difference_in_both_directions_is_one() -> None:
    """Broken: people read the same mistake twice."""
    found = only(Level.FULL, record(("a", "boolean")), record(("a", "int")))
    assert found.breaks == "FULL"
    assert found.to_json() == {
        "path": "/fields/0/type",
        "rule": "TYPE_CHANGED",
        "reader": "boolean",
        "writer": "int",
        "breaks": "FULL",
        "message": "The reader has boolean, the writer int.",
        "fix": [{"op": "replace", "path": "/fields/0/type", "value": "int"}],
    }


def test_no_change_of_a_type_from_another_text_is_offered() -> None:
    """Broken: a patch points into a text that the producer does not send."""
    text = json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": "F"}]})
    small, large = (parse_schema(f'{{"type": "fixed", "name": "F", "size": {size}}}') for size in (4, 8))
    old, new = parse_schema(text, named={"F": small}), parse_schema(text, named={"F": large})
    found = only(Level.BACKWARD, new, old)
    assert (found.rule, found.path) == ("FIXED_SIZE_CHANGED", "/fields/0/type")
    assert found.fix is None


def test_each_removed_field_and_each_lost_type_is_a_difference() -> None:
    """Broken: of three removed fields only one is named."""
    found = check(Level.FORWARD, record(), [record(("a", "int"), ("b", "int"), ("c", "int"))])
    assert [(item.rule, item.path) for item in found] == [("FIELD_NEEDS_DEFAULT", "/fields")] * 3
    assert len({item.message for item in found}) == 3
    found = check(Level.BACKWARD, record(("a", "int")), [record(("a", ["null", "int", "string"]))])
    assert [item.rule for item in found] == ["UNION_NARROWED"] * 2


def test_types_that_contain_themselves_and_each_other_end() -> None:
    """Broken: the comparison of two trees never ends."""

    def tree(leaf: str) -> Schema:
        branch = {
            "type": "record",
            "name": "B",
            "fields": [{"name": "up", "type": ["null", "T"]}, {"name": "v", "type": leaf}],
        }
        return record(("children", {"type": "array", "items": branch}), ("next", ["null", "T"]), name="T")

    assert check(Level.FULL, tree("int"), [tree("int")]) == []
    found = only(Level.BACKWARD, tree("int"), tree("long"))
    assert found.path == "/fields/0/type/items/fields/1/type"


def wide(first: int, types: int) -> Schema:
    """Unions of many records of which each one has a union of all earlier ones."""
    branches: list[Any] = []
    for index in range(types):
        earlier = [f"R{first + other}" for other in range(index)]
        fields = [{"name": "a", "type": ["null", *earlier]}]
        branches.append(
            {"type": "record", "name": f"R{first + index}", "fields": fields, "aliases": [f"X.R{j}" for j in range(5)]}
        )
    return parse_schema(json.dumps(branches))


def test_a_comparison_of_too_many_pairs_is_refused() -> None:
    """Broken: two schemas of a megabyte keep a registry busy for hours."""
    many = parse_schema(json.dumps([{"type": "record", "name": f"R{i}", "fields": []} for i in range(600)]))
    others = parse_schema(json.dumps([{"type": "record", "name": f"S{i}", "fields": []} for i in range(600)]))
    with pytest.raises(TooComplex):
        check(Level.BACKWARD, many, [others])
    assert len(check(Level.BACKWARD, wide(0, 30), [wide(100, 30)])) > 0


@given(st.integers(0, 1 << 32), st.sampled_from([Level.BACKWARD, Level.FORWARD, Level.FULL]))
def test_every_offered_patch_makes_the_pair_compatible(seed: int, level: Level) -> None:
    """Broken: a producer applies the patch of a refusal and is refused again."""
    try:
        old, new = (parse_schema(json.dumps(one)) for one in pair(seed))
    except SchemaError:
        return
    found = compare(level, new, [old])
    assert compatible(level, new, [old]) is (not found.differences)
    offered = [difference.fix for difference in found.differences if difference.fix is not None]
    for patch in [*offered, *([] if found.repair is None else [found.repair])]:
        assert check(level, changed(new, patch), [old]) == []
    if len(found.differences) == 1:
        assert found.differences[0].fix == found.repair
    assert {item.rule for item in found.differences} <= {item.rule for item in diff(old, new).differences}


@given(st.lists(st.integers(0, 1 << 32), min_size=2, max_size=4), st.sampled_from(list(Level)))
def test_a_repair_fits_every_version_that_counts(seeds: list[int], level: Level) -> None:
    """Broken: a patch that ends the differences from the first version brings some from the second one."""
    try:
        schemas = [parse_schema(json.dumps(pair(seed)[0])) for seed in seeds]
    except SchemaError:
        return
    *existing, new = schemas
    found = compare(level, new, existing)
    if found.repair is not None:
        assert found.differences
        assert compatible(level, changed(new, found.repair), existing)


def test_several_differences_have_one_patch() -> None:
    """Broken: each of three new fields has a patch that leaves the schema incompatible."""
    new, old = record(("a", "int"), ("b", "int"), ("c", "int")), record()
    found = compare(Level.BACKWARD, new, [old])
    assert [difference.fix for difference in found.differences] == [None] * 3
    assert found.repair == [{"op": "add", "path": f"/fields/{n}/default", "value": 0} for n in range(3)]


@pytest.mark.parametrize("level", [Level.BACKWARD, Level.FORWARD, Level.FULL])
def test_nine_of_ten_incompatible_pairs_have_a_repair(level: Level) -> None:
    """Broken: most refusals say what is wrong and not what to do. bench/patches.py counts more pairs."""
    refused = repaired = 0
    for seed in range(400):
        try:
            old, new = (parse_schema(json.dumps(one)) for one in pair(seed))
        except SchemaError:
            continue
        if check(level, new, [old]):
            refused += 1
            repaired += repair(level, new, [old]) is not None
    assert refused > 100
    assert repaired >= 0.9 * refused


@pytest.mark.parametrize(
    "patch",
    [
        [{"op": "test", "path": ""}],
        [{"op": "replace", "path": "/b", "value": 1}],
        [{"op": "remove", "path": "/a/9"}],
        [{"op": "add", "path": "/a/x", "value": 1}],
        [{"op": "add", "path": "/a/0/b", "value": 1}],
        [{"op": "add", "path": "a", "value": 1}],
    ],
)
def test_a_patch_that_does_not_fit_is_refused(patch: list[dict[str, Json]]) -> None:
    """Broken: a change is lost in silence."""
    with pytest.raises(PatchError):
        apply_patch({"a": [1]}, patch)


def test_a_patch_is_applied_in_order_and_to_a_copy() -> None:
    """Broken: the fix that is shown is not the one that was tried."""
    document: Json = {"a": [1, 2], "b/c": 3}
    patch: list[dict[str, Json]] = [
        {"op": "add", "path": "/a/0", "value": 0},
        {"op": "add", "path": "/a/-", "value": 3},
        {"op": "remove", "path": "/a/1"},
        {"op": "replace", "path": "/b~1c", "value": None},
        {"op": "add", "path": "/d", "value": {}},
    ]
    assert apply_patch(document, patch) == {"a": [0, 2, 3], "b/c": None, "d": {}}
    assert document == {"a": [1, 2], "b/c": 3}
    assert apply_patch(document, [{"op": "replace", "path": "", "value": 1}]) == 1


def test_hundreds_of_new_and_lost_fields_take_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: of a record with a thousand fields, sixty of them new, nothing is offered: each one takes a try."""
    monkeypatch.setattr(repairs, "MAX_TRIES", 2)
    kept = [(f"k{n}", "int") for n in range(900)]
    new, old = (
        record(*kept, *((f"{side}{n}", kind) for n in range(60))) for side, kind in (("a", NULLABLE), ("b", "int"))
    )
    for level, operations in ((Level.BACKWARD, 60), (Level.FORWARD, 60), (Level.FULL, 120)):
        found = compare(level, new, [old])
        assert found.repair is not None
        assert len(found.repair) == operations
        assert compatible(level, changed(new, found.repair), [old])


def test_lost_fields_of_one_type_define_it_once() -> None:
    """Broken: hundreds of lost fields of one enum get no patch, or a patch with hundreds of copies of a large type."""
    kind = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    old = record(("f0", kind), *((f"f{n}", "E") for n in range(1, 300)))
    found = compare(Level.FORWARD, record(), [old])
    assert found.repair is not None
    first, *others = (operation["value"]["type"] for operation in cast(Any, found.repair))
    assert (first["symbols"], others) == (["A", "B"], ["E"] * 299)


def test_no_default_is_made_of_billions_of_values() -> None:
    """Broken: a schema of 2 KB keeps a registry busy for ever: records of eight fields of records of eight fields, and so on."""
    inner: Any = "int"
    for level in range(8):
        fields = [{"name": "f0", "type": inner}, *({"name": f"f{n}", "type": f"L{level - 1}"} for n in range(1, 9))]
        inner = {"type": "record", "name": f"L{level}", "fields": fields if level else [{"name": "f0", "type": "int"}]}
    assert compare(Level.BACKWARD, record(("x", inner)), [record()]).repair is None
    small = {"type": "record", "name": "S", "fields": [{"name": "a", "type": "int"}]}
    assert compare(Level.BACKWARD, record(("x", small)), [record()]).repair is not None


def test_the_search_for_a_patch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the comparison of two schemas of 1 MB takes minutes, and registrations wait for it."""
    tried: list[int] = []
    original = repairs._apply

    def counted(*args: Any) -> Schema | None:
        tried.append(1)
        return original(*args)

    monkeypatch.setattr(repairs, "_apply", counted)
    old, new = (record(*((f"f{n}", kind) for n in range(20))) for kind in ("string", "int"))
    assert repair(Level.FULL, new, [old]) is not None
    assert len(tried) == 40  # each of the twenty is tried, and then done
    tried.clear()
    monkeypatch.setattr(repairs, "MAX_TRIES", 19)
    assert repair(Level.FULL, new, [old]) is None
    assert not tried, "it was known at once that so few tries are not enough"
    monkeypatch.setattr(repairs, "MAX_TRIES", 200)
    monkeypatch.setattr(repairs, "MAX_CPU_S", -1.0)
    assert repair(Level.FULL, new, [old]) is None
    assert not tried
    monkeypatch.undo()
    many = record(*((f"f{n}", "int") for n in range(2000)))
    assert repair(Level.FORWARD, record(("a", "int")), [many]) is None, "a patch of 2,000 operations"


def test_a_patch_is_tried_as_the_text_that_a_client_sends() -> None:
    """Broken: the patch fits in memory, and the text that it makes is refused."""
    long = {"type": "fixed", "name": "F", "size": 1, "doc": "x" * 600_000}
    new = parse_schema(json.dumps({"type": "record", "name": "R", "doc": "x" * 700_000, "fields": []}))
    assert repair(Level.FORWARD, new, [record(("a", long))]) is None
    endless = parse_schema(
        '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "double", "default": -1e999}]}'
    )
    [found] = compare(
        Level.FORWARD,
        record(),
        [
            parse_schema(
                json.dumps(
                    {
                        "type": "record",
                        "name": "R",
                        "fields": [{"name": "i", "type": {**cast(Any, endless.to_json()), "name": "I"}}],
                    }
                ).replace("-Infinity", "-1e999")
            )
        ],
    ).differences
    assert '"default":"-Infinity"' in to_text(found.fix)
    kept = {"type": "bytes", "unknown": 10**30}
    [found] = compare(Level.FORWARD, record(), [record(("a", kept))]).differences
    assert found.fix == [{"op": "add", "path": "/fields/-", "value": {"name": "a", "type": kept}}]


def test_the_patch_of_a_diff_is_for_the_level() -> None:
    """Broken: only BACKWARD is asked for, and a change that FORWARD needs makes it impossible."""
    new, old = record(("a", "int"), ("b", "int")), record(("c", "int"))
    for level in (Level.BACKWARD, Level.FORWARD, Level.FULL):
        found = diff(old, new, level)
        assert sorted(one.breaks for one in found.differences if one.breaks) == ["BACKWARD", "BACKWARD", "FORWARD"]
        assert found.repair is not None
        assert compatible(level, changed(new, found.repair), [old])
    assert diff(record(), record(("a", "int")), Level.FORWARD).differences[0].fix is None
