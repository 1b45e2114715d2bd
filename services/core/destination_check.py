"""Checks a pipe file's destinations beyond their shape: allowed URLs, allowed headers, signing secrets.

Expel calls it when it starts, and the command line before anything starts. Each mistake names file, line and key.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from services.core.net_guard import NetPolicy, check_destination_url
from services.core.pipes import PipeFile, Webhook
from services.core.signing import BadSecret, read_signing_keys
from services.core.yaml_source import Document, KeyPath, Problem

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_VALUE = re.compile(r"[\t -~]{0,2000}")
_OURS = frozenset(
    {
        "host",
        "content-type",
        "content-length",
        "content-encoding",
        "accept-encoding",
        "expect",
        # hop-by-hop: they concern the connection, not the request
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OUR_PREFIXES = ("webhook-", "proxy-")


def check_header(name: str, value: str) -> str | None:
    """The reason why a destination may not set this header, for a person; None when it may."""
    if not _TOKEN.fullmatch(name):
        return "is not a valid header name"
    if name.lower() in _OURS or name.lower().startswith(_OUR_PREFIXES):
        return "this header is set by Penstock or the connection and cannot be chosen"
    if not _VALUE.fullmatch(value):
        return "a header value is at most 2000 printable ASCII characters on one line"
    return None


def check_destinations(
    document: Document, pipes: PipeFile, policy: NetPolicy, environ: Mapping[str, str] | None = None
) -> list[Problem]:
    """Every mistake in the webhooks of this file. environ: with it, signing secrets are checked, too. Blocking."""
    problems = []
    for name, pipe in pipes.pipes.items():
        for index, destination in enumerate(pipe.destinations):
            if destination.webhook is not None:
                path: KeyPath = ("pipes", name, "destinations", index, "webhook")
                problems += _check_webhook(document, path, destination.webhook, policy, environ)
    return problems


def _check_webhook(
    document: Document, path: KeyPath, webhook: Webhook, policy: NetPolicy, environ: Mapping[str, str] | None
) -> list[Problem]:
    problems = []
    if (reason := check_destination_url(webhook.url, policy)) is not None:
        problems.append(document.problem((*path, "url"), reason))
    for name, value in webhook.headers.items():
        if (reason := check_header(name, value)) is not None:
            problems.append(document.problem((*path, "headers", name), reason))
    lower = [name.lower() for name in webhook.headers]
    if len(set(lower)) != len(lower):
        problems.append(document.problem((*path, "headers"), "a header occurs twice"))
    if environ is not None and webhook.secret is not None:
        try:
            read_signing_keys(webhook.secret, Path(document.path).parent, environ)
        except BadSecret as error:
            problems.append(document.problem((*path, "secret"), str(error)))
    return problems
