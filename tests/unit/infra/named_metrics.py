"""The metrics that rules and dashboards name, held against those that exist."""

import re

from prometheus_client import Counter, Gauge
from prometheus_client.metrics import MetricWrapperBase

from services.core import metrics
from services.core.lag import LagFamily

_NAMED = re.compile(r"(?<![\w:])penstock_[a-z0-9_]+(?![\w:])(?:\{([^}]*)\})?")
_RECORDED = re.compile(r"\b[a-z_]+:penstock_[a-z0-9_]+:[a-z0-9_]+\b")
TARGET_LABELS = ("component", "process")
"""Of each series, by the list of targets."""
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")


def existing() -> dict[str, tuple[str, ...]]:
    """Every series that the services show, with its labels."""
    found: dict[str, tuple[str, ...]] = {}
    for value in vars(metrics).values():
        if isinstance(value, LagFamily):
            found |= {f"{value.name}{end}": value._label_names for end in ("_count", "_sum")}
            if value.has_buckets:
                found[f"{value.name}_bucket"] = (*value._label_names, "le")
        elif isinstance(value, Counter | Gauge):
            assert isinstance(value, MetricWrapperBase)
            found[f"{value._name}_total" if isinstance(value, Counter) else value._name] = tuple(value._labelnames)
    return found


def find_strangers(expression: str) -> list[str]:
    """What the expression names and no service shows: a metric, or a label behind it in braces."""
    known, strangers = existing(), []
    for match in _NAMED.finditer(expression):
        name = match[0].split("{")[0]
        if name not in known:
            strangers.append(name)
        strangers += [
            f"{name}: {label}"
            for label in _MATCHER.findall(match[1] or "")
            if label not in (*known.get(name, (label,)), *TARGET_LABELS)
        ]
    return strangers


def find_recorded(expression: str) -> set[str]:
    """The recording rules that the expression names."""
    return set(_RECORDED.findall(expression))
