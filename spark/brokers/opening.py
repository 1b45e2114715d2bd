"""From a broker URL to the endpoint that Spark uses."""

from urllib.parse import urlsplit

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
    raise BadConfiguration([Problem("broker", "", f"{url!r} cannot be used. Try: log:///path or kafka://host:9092")])
