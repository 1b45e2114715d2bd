"""A Kafka that starts on what is there, and says why when it cannot."""

from pathlib import Path

import pytest

from services.core.jvm.kafka import KafkaCluster, KafkaNotReady


@pytest.mark.kafka
def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    """If this fails, a wrong setting is a time-out without a reason, and what had started goes on running."""
    cluster = KafkaCluster(tmp_path / "kafka", brokers=1, settings={"num.network.threads": "none"})
    with pytest.raises(KafkaNotReady, match=r"num\.network\.threads"):
        cluster.start(timeout_s=60)
    assert not any(broker.is_running for broker in cluster.brokers.values())


@pytest.mark.kafka
def test_a_stopped_cluster_starts_again_on_its_data(tmp_path: Path) -> None:
    """If this fails, `penstock demo --broker kafka` on a kept folder loses what it had."""
    for _ in range(2):
        with KafkaCluster(tmp_path / "kafka", brokers=1) as cluster:
            assert cluster.brokers[1].is_running
            identity = (cluster.brokers[1].data / "meta.properties").read_text()
        assert cluster.brokers[1].pid is None
        assert (tmp_path / "kafka" / "cluster-id").read_text() in identity
