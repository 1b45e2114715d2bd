"""Waiting until a service says on its management port that it is ready."""

import aiohttp
import orjson

POLL_S = 0.1
TIMEOUT = aiohttp.ClientTimeout(total=3.0)


async def ask_ready(session: aiohttp.ClientSession, management: str) -> str | None:
    """None when ready, else why not, for a person. Up to 3 s."""
    try:
        async with session.get(f"http://{management}/readyz", timeout=TIMEOUT) as response:
            body = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
        return "does not answer yet"
    reason = body.get("reason") if isinstance(body, dict) else None
    return None if response.status == 200 else str(reason or f"status {response.status}")
