"""Every rule of the comparison, by the example that docs/schema-rules.md shows."""

import pytest

from services.core.avro.compatibility import Level, check
from services.core.avro.differences import find
from services.core.avro.parsing import parse_schema
from services.core.avro.patch import apply_patch
from services.core.avro.repair import diff, repair
from services.core.avro.resolution import Resolution
from services.core.avro.rules import RULES, Category


@pytest.mark.parametrize("name", RULES)
def test_the_example_of_a_rule(name: str) -> None:
    """Broken: the page shows something else than people get."""
    rule = RULES[name]
    old, new = parse_schema(rule.old), parse_schema(rule.new)
    found = [item for item in diff(old, new).differences if item.rule == name]
    assert len(found) == 1
    breaks = bool(found[0].breaks)
    assert breaks == (rule.category is not Category.NOTE)
    if not breaks:
        assert name not in {item.rule for item in check(Level.FULL, new, [old])}
        return
    patch = repair(Level.FULL, new, [old])
    assert patch is not None
    assert new.origin is not None
    assert check(Level.FULL, new.origin.again(apply_patch(new.origin.document, patch), ""), [old]) == []


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.category is Category.LOGICAL])
def test_logical_rules_are_only_stricter(name: str) -> None:
    """Broken: a pair that Avro accepts is refused for a reason that the page does not have."""
    old, new = parse_schema(RULES[name].old), parse_schema(RULES[name].new)
    for reader, writer in ((new, old), (old, new)):
        assert Resolution().reads(reader, writer)
        assert {RULES[item.rule].category for item in find(reader, writer, new_reads=True)} <= {Category.LOGICAL}
