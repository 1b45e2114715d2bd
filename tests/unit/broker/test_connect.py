"""Broker URLs: what is not understood is refused before anything starts."""

from pathlib import Path

import pytest

from services.core.broker.connect import BadBrokerUrl, KafkaAddress, open_broker, parse_kafka_url, prefix_of


@pytest.mark.parametrize(
    "url",
    [
        "kafka://h:9092?acks=1",
        "log:///tmp/x?sync=off",
        "kafka://h:9092/x",
        "kafka://h",
        "kafka://h:99999999",
        "kafka://h:9092,",
        "kafka://user:hunter2@h:9092",
        "log://relative",
        "redis://h:1",
        "kafka://h:9092?prefix=acme",
        "kafka://h:9092?prefix=a.&prefix=b.",
        "kafka://h:9092?prefix=a.&acks=1",
        "kafka://h:9092?security=kafka.yaml",
        "log:///tmp/x?prefix=acme.",
        "",
    ],
)
def test_refused(url: str) -> None:
    """Broken: somebody believes that acks=1, or a second host, is in force."""
    with pytest.raises(BadBrokerUrl) as caught:
        open_broker(url)
    assert "hunter2" not in str(caught.value)


def test_prefix() -> None:
    """Broken: a fleet gets other names than its URL says."""
    assert parse_kafka_url("kafka://h:1,i:2?prefix=acme.") == KafkaAddress("h:1,i:2", "acme.")
    assert parse_kafka_url("kafka://h:1") == KafkaAddress("h:1", "")
    secured = KafkaAddress("h:1", "acme.", Path("/etc/kafka.yaml"))
    assert parse_kafka_url("kafka://h:1?security=/etc/kafka.yaml&prefix=acme.") == secured
    urls = ("kafka://h:1?prefix=a.", "kinesis://eu-west-1?prefix=b.", "log:///tmp/x", "kafka://h:1?prefix=.", "?")
    assert [prefix_of(url) for url in urls] == ["a.", "b.", "", "", ""]
