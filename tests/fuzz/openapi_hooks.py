"""What schemathesis must be told beyond the document. It loads this module by name, in its own process."""

import json
from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """Mend good requests where JSON Schema cannot say the rule: the body is as these headers say, a time has bounds that
    move, and a number with a point is no integer (to JSON Schema 1.0 is one)."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for name in ("Content-Encoding", "ce-specversion"):
        case.headers.pop(name, None)
    if str(case.media_type).startswith("application/cloudevents"):
        for one in case.body if isinstance(case.body, list) else [case.body]:
            if isinstance(one, dict):
                one.pop("time", None)
                one.update({name: _whole(value) for name, value in one.items() if name != "data"})


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


@schemathesis.serializer("application/x-ndjson", "application/jsonl")
def write_lines(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """A good value is a text, of which each line becomes an event; any other becomes a line that is none."""
    if isinstance(value, str):
        return "\n".join(json.dumps({"line": line}) for line in value.splitlines() or [""]).encode()
    return f"no event: {value!r}".encode(errors="replace")
