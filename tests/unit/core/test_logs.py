"""Logs: one JSON object a line, and no secret in any of them."""

import json
import subprocess
import sys

from services.core.security.masking import mask_secrets

SECRET = "hunter2hunter2"


def test_secrets_are_masked_at_any_depth() -> None:
    """Broken: whoever reads the logs can sign webhooks or send events."""
    event = {
        "event": f"POST https://user:{SECRET}@example.org failed",
        "api_key": SECRET,
        "headers": {"Authorization": f"Bearer {SECRET}", "accept": "x"},
        "items": [f"key psk_{SECRET}", {"webhook_signature": f"v1,{SECRET}"}],
        "error": ValueError(f"secret whsec_{SECRET}= is bad"),
        "note": f"authorization: bearer {SECRET}",
        "unknown": f"key eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET} is unknown",
        "count": 3,
        "share": 0.5,
        "nothing": None,
    }
    masked = mask_secrets(None, "info", dict(event))
    assert SECRET not in json.dumps(masked)
    assert masked["event"] == "POST https://***@example.org failed"
    assert (masked["count"], masked["share"], masked["nothing"]) == (3, 0.5, None)
    assert masked["headers"]["accept"] == "x"


def test_every_line_is_json_libraries_and_tracebacks_included() -> None:
    """Broken: a log collector cannot read some lines, or a traceback shows a secret."""
    program = f"""
import logging
from services.core.process.lifecycle import configure_logs
import structlog
configure_logs("sample", "info")
structlog.get_logger().debug("not shown")
structlog.get_logger().info("shown", token="{SECRET}", path=object)
logging.getLogger("aiohttp").warning("library said %s", "psk_{SECRET}")
try:
    raise ValueError("whsec_{SECRET}")
except ValueError:
    structlog.get_logger().exception("failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["shown", "library said ***", "failed"]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert all(line["service"] == "sample" and line["timestamp"].endswith("Z") for line in lines)
    assert "Traceback" in lines[2]["exception"]
    assert SECRET not in done.stderr
    assert not done.stdout
