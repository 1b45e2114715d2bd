"""Kinesis behind the broker contract, on aiobotocore. Nothing else in the project imports the AWS SDK (docs/adr/0010)."""

from services.core.broker.kinesis.broker import KinesisBroker
from services.core.broker.kinesis.timing import Timing

__all__ = ["KinesisBroker", "Timing"]
