"""A client of the registry's API, for the command line."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from services.fleet.access import ingest_url, require_fleet
from services.fleet.problem import CommandFailed, why_no_answer

TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_WRONG_INPUT = frozenset({400, 404, 413, 415, 422})


@dataclass(frozen=True, slots=True)
class Registry:
    url: str
    key: str | None = field(default=None, repr=False)


def find_registry(url: str | None, key: str | None, data: Path) -> Registry:
    """The registry as given, or that of the fleet on the data folder. Blocking. Raises CommandFailed."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise CommandFailed(
                "--registry needs the address of a registry", "--registry http://127.0.0.1:8084", status=2
            )
        return Registry(url.rstrip("/"), key)
    state = require_fleet(data, "--registry with the address of a registry")
    if not state.registry:
        raise CommandFailed(
            f"the fleet on {data} runs no registry", "penstock up --registry 127.0.0.1:8084, or --registry here"
        )
    return Registry(ingest_url(state.registry), key)


async def ask(
    registry: Registry,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    accept: Collection[int] = (),
) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of the answer. accept: refusals that are returned.

    Raises CommandFailed with the registry's own message for any other refusal; status 2 where the input is wrong.
    """
    head = {} if registry.key is None else {"Authorization": f"Bearer {registry.key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT, headers=head) as session,
            session.request(method, registry.url + path, json=body, allow_redirects=False) as answer,
        ):
            found: dict[str, Any] = json.loads(await answer.read())  # orjson rounds integers of more than 64 bits
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CommandFailed(
            f"the registry at {registry.url} does not answer: {why_no_answer(error)}", "penstock status"
        ) from error
    if answer.status in (200, 201) or answer.status in accept:
        return answer.status, found
    if str(found.get("type", "")).endswith(":subject-not-found"):
        raise CommandFailed("there is no such subject", "penstock schemas list", status=2)
    text = ". ".join(str(found[key]) for key in ("title", "detail") if found.get(key))
    remedy = "--key-file with an API key, or PENSTOCK_KEY" if answer.status == 401 else ""
    raise CommandFailed(text, remedy, status=2 if answer.status in _WRONG_INPUT else 1)
