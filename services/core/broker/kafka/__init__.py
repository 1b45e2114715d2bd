"""Kafka behind the broker contract, on aiokafka. Nothing else in the project imports aiokafka (docs/adr/0003)."""

from services.core.broker.kafka.broker import KafkaBroker, open_kafka
from services.core.broker.kafka.cluster import Timing

__all__ = ["KafkaBroker", "Timing", "open_kafka"]
