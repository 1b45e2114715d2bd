"""The published JSON Schema of the pipe file, made from the models that check it."""

import json
from typing import Any

from services.core.pipes import PipeFile
from services.core.units import DURATION_PATTERN, SIZE_PATTERN, format_duration, format_size


def pipe_schema() -> str:
    """The schema as text, the same for the same models. `schema/pipes.schema.json` is this."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_as_written(PipeFile.model_json_schema()),
        "title": "Penstock pipe file",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _as_written(node: Any) -> Any:
    """Defaults as one would write them in the file: `7d`, not 604800.0; none where the default is a whole object."""
    if isinstance(node, list):
        return [_as_written(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _as_written(value)
        for key, value in node.items()
        if not (key == "default" and (value is None or isinstance(value, dict)))
        and not (key == "title" and isinstance(value, str))
    }
    if "patternProperties" in kept:
        kept["additionalProperties"] = False  # a name that does not fit is a mistake, not another kind of key
    default, pattern = kept.get("default"), kept.get("pattern")
    if pattern == DURATION_PATTERN and isinstance(default, int | float):
        kept["default"] = format_duration(default)
    items = kept.get("items")
    if isinstance(items, dict) and items.get("pattern") == DURATION_PATTERN and isinstance(default, list):
        kept["default"] = [format_duration(seconds) for seconds in default]
    if pattern == SIZE_PATTERN and isinstance(default, int):
        kept["default"] = format_size(default)
    return kept
