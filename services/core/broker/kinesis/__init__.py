"""Kinesis behind the broker contract, on aiobotocore. Nothing else in the project imports the AWS SDK (docs/adr/0010)."""

from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.broker import KinesisBroker

__all__ = ["KinesisBroker", "Timing"]
