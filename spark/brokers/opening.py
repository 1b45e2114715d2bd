"""From a broker URL to the endpoint that Spark uses."""

from urllib.parse import urlsplit

from services.core.broker.kinesis_url import parse_address
from services.core.yaml_source import BadConfiguration, Problem
from spark.brokers.endpoint import Endpoint
from spark.brokers.kafka import KafkaEndpoint
from spark.brokers.log import LogEndpoint


def open_endpoint(url: str) -> Endpoint:
    """Raises BadConfiguration. Nothing is reached yet."""
    parts = urlsplit(url)
    if parts.scheme == "log" and not parts.netloc and parts.path.startswith("/"):
        return LogEndpoint(parts.path)
    if parts.scheme == "kafka" and parts.netloc and "@" not in parts.netloc and parts.path in ("", "/"):
        return KafkaEndpoint(parts.netloc)
    if parts.scheme == "kinesis":
        return _open_kinesis(url)
    raise BadConfiguration(
        [Problem("broker", "", f"{url!r} cannot be used. Try: log:///path, kafka://host:9092 or kinesis://eu-west-1")]
    )


def _open_kinesis(url: str) -> Endpoint:
    """The AWS SDK is loaded by those alone who use it."""
    from spark.brokers.kinesis import KinesisEndpoint

    try:
        parse_address(url)
    except ValueError as error:
        raise BadConfiguration([Problem("broker", "", str(error))]) from error
    return KinesisEndpoint(url)
