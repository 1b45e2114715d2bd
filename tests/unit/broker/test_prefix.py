"""The prefix of a fleet's names, and the names that it finds on a cluster that others use."""

import pytest

from services.core.broker.errors import DataDamaged, NotOwner, OffsetOutOfRange
from services.core.broker.kafka.prefixed import _Names
from services.core.broker.kinesis.dynamo_table import table_name
from services.core.broker.prefix import check_prefix, find_own
from services.core.broker.record import TopicPartition

_LONGEST_STREAM = 63 + len(".parked")


@pytest.mark.parametrize("text", ["", "a.", "acme.", "Team_1-eu.prod.", "a" * 31 + "."])
def test_good(text: str) -> None:
    """Broken: a prefix that is allowed is refused, or names become longer than Kinesis allows."""
    assert check_prefix(text) == text
    assert len(text) + _LONGEST_STREAM <= 128


@pytest.mark.parametrize(
    "text",
    [".", "acme", "acme-", "_a.", ".a.", "a b.", "ä.", "a/.", "a" * 32 + ".", "penstock.", "penstock-x.", "a.\n"],
)
def test_refused(text: str) -> None:
    """Broken: names that a cluster refuses, or those of a fleet without a prefix."""
    with pytest.raises(ValueError, match="Try: prefix=acme"):
        check_prefix(text)


def test_other_fleets_are_not_seen() -> None:
    """Broken: a fleet counts, checks or removes topics of another one, or misses its own."""
    plain = [
        "orders",
        "billing.out",
        "billing.dead",
        "acme.dead",
        "penstock.telemetry",
        "penstock.control",
        "of others.x",
    ]
    acme = ["acme.orders", "acme.penstock.telemetry", "acme.penstock.retry-in", "acme.billing.out"]
    inner = ["acme.eu.orders", "acme.eu.penstock.control", "acme2.orders"]
    names = [*plain, *acme, *inner]
    assert find_own(names, "") == [*plain, "acme2.orders"]
    assert find_own(names, "acme.") == ["acme.dead", *acme]
    assert find_own(names, "acme.eu.") == inner[:2]
    assert find_own(plain, "") == plain
    assert find_own(names, "nobody.") == []


def test_table() -> None:
    """Broken: two fleets share the leases of a group, or an existing fleet begins anew."""
    assert table_name("billing.shop") == "penstock-billing.shop"
    assert table_name("billing.shop", "acme.") == "acme.penstock-billing.shop"


def test_errors() -> None:
    """Broken: a service does not know its own partition in an error, or the operator does not find it on the cluster."""
    names = _Names("acme.")
    errors: list[OffsetOutOfRange | DataDamaged] = [OffsetOutOfRange("acme.orders", 1, 5, 7, 9)]
    errors.append(DataDamaged("acme.orders", ((1, 5, 7),), "torn"))
    for error in errors:
        with pytest.raises(type(error), match=r"acme\.orders") as caught, names.in_errors():
            raise error
        assert caught.value is error
        assert error.topic == "orders"
    with pytest.raises(NotOwner, match=r"acme\.orders\[1\]") as refused, names.in_errors():
        raise NotOwner(frozenset({("acme.orders", 1)}))
    assert refused.value.partitions == {TopicPartition("orders", 1)}
