"""What a `kinesis://` URL says."""

import pytest

from services.core.broker.connect import KinesisAddress, parse_kinesis_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("kinesis://eu-west-1", KinesisAddress("eu-west-1")),
        ("kinesis://eu-west-1?prefix=acme-1.", KinesisAddress("eu-west-1", prefix="acme-1.")),
        ("kinesis://eu-west-1?fan_out=1", KinesisAddress("eu-west-1", fan_out=True)),
        (
            "kinesis://us-gov-east-1?endpoint=https://a:1&dynamodb=http://b&fan_out=0",
            KinesisAddress("us-gov-east-1", "https://a:1", "http://b"),
        ),
    ],
)
def test_what_is_understood(url: str, address: KinesisAddress) -> None:
    """If it fails, groups poll that should be pushed to, or go to another region's Kinesis."""
    assert parse_kinesis_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "kinesis://",
        "kinesis://Frankfurt",
        "kinesis://eu-west-1/stream",
        "kinesis://eu-west-1?fan_out=yes",
        "kinesis://eu-west-1?fan_out=1&fan_out=1",
        "kinesis://eu-west-1?endpoint=1",
        "kinesis://eu-west-1?key=secret",
        "kinesis://AKID:secret@eu-west-1",
        "kinesis://eu-west-1?secret",
        "kinesis://eu-west-1?fan_out=secret",
        "kinesis://eu-west-1?prefix=secret",
        "kinesis://eu-west-1?endpoint=http://AKID:secret@localhost",
        "kinesis://eu-west-1?dynamodb=http://localhost/secret",
        "kinesis://eu-west-1?endpoint=http://localhost:secret",
        "kinesis://eu-west-1?endpoint=http://[secret",
        "kinesis://[secret",
    ],
)
def test_what_is_refused(url: str) -> None:
    """If it fails, a slip of the pen is passed over and something else happens than was meant, or logs show what is secret."""
    with pytest.raises(ValueError, match="Try: ") as refused:
        parse_kinesis_url(url)
    assert "secret" not in str(refused.value)
    assert "AKID" not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
