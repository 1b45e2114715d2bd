"""Structured logs: one JSON object a line on stderr; secrets are masked before anything is rendered."""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import orjson
import structlog

from services.core.masking import MASK, mask_text

_SECRET_KEY = re.compile(r"secret|password|token|authorization|api_?key|signature|cookie", re.IGNORECASE)


def mask_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask values of secret-looking keys, and secret-looking parts of every text, at any depth."""
    for key, value in event.items():
        event[key] = _masked(key, value)
    return event


def _masked(key: object, value: Any) -> Any:
    if isinstance(key, str) and _SECRET_KEY.search(key):
        return MASK
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(inner): _masked(inner, content) for inner, content in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked("", item) for item in value]
    return mask_text(value if isinstance(value, str) else str(value))


def configure_logs(service: str, level: str) -> None:
    """Set up structlog for this process, and hand the standard library's records to it. level: debug … error."""
    number = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask_secrets,
            structlog.processors.JSONRenderer(serializer=lambda data, **_: orjson.dumps(data, default=str).decode()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(handlers=[_Forward()], level=max(number, logging.WARNING), force=True)
    # It logs an error for each failed reconnect of each client; our own errors say the same once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class _Forward(logging.Handler):
    """Records of libraries, as structured lines."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )
