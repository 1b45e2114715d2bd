"""Checks a pipe file's destinations beyond their shape: allowed URLs, allowed headers, signing secrets, credentials.

Expel calls it when it starts, and the command line before anything starts. Each mistake names file, line and key.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.core.http.net_guard import NetPolicy, check_destination_url, is_loopback_url
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.webhook import Webhook
from services.core.security.credentials import read_credentials
from services.core.security.signing import BadSecret, read_signing_keys
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
_USUAL = frozenset({"accept", "user-agent", "traceparent"})
_SET_ELSEWHERE = "this header is set by Penstock or the connection and cannot be chosen"
_SECRET_NAME = re.compile(
    r"authorization|authentication|cookie|token|secret|password|(?:api|access|auth)[-_]?key", re.IGNORECASE
)


def check_header(name: str, value: str) -> str | None:
    """The reason why a destination may not set this header, for a person; None when it may."""
    if not _TOKEN.fullmatch(name):
        return "is not a valid header name"
    if name.lower() in _OURS or name.lower().startswith(_OUR_PREFIXES):
        return _SET_ELSEWHERE
    if not _VALUE.fullmatch(value):
        return "a header value is at most 2000 printable ASCII characters on one line"
    return None


def check_destinations(
    document: Document, pipes: PipeFile, policy: NetPolicy, environ: Mapping[str, str] | None = None
) -> list[Problem]:
    """Every mistake in the webhooks of this file. environ: with it, secrets and certificates are checked, too. Blocking."""
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
    problems += [document.problem((*path, *key), reason) for key, reason in _check_auth(webhook, policy)]
    if environ is not None and webhook.secret is not None:
        try:
            read_signing_keys(webhook.secret, Path(document.path).parent, environ)
        except BadSecret as error:
            problems.append(document.problem((*path, "secret"), str(error)))
    if environ is not None:
        _, mistakes = read_credentials(webhook, Path(document.path).parent, environ)
        problems += [document.problem((*path, *key), reason) for key, reason in mistakes]
    return problems


def _check_auth(webhook: Webhook, policy: NetPolicy) -> Iterator[tuple[KeyPath, str]]:
    if webhook.tls is not None and not _is_https(webhook.url):
        yield ("tls",), "needs a url with https://"
    auth = webhook.auth
    if auth is None:
        return
    name = "authorization"
    if auth.header is not None:
        name = auth.header.name.lower()
        reason = _SET_ELSEWHERE if name in _USUAL else check_header(name, "")
        if reason is not None:
            yield ("auth", "header", "name"), reason
    if any(given.lower() == name for given in webhook.headers):
        yield ("auth",), "sets a header that is also in headers. Try: remove it there"
    if auth.oauth is not None:
        if (reason := check_destination_url(auth.oauth.token_url, policy)) is not None:
            yield ("auth", "oauth", "token_url"), reason
        if auth.oauth.tls is not None and not _is_https(auth.oauth.token_url):
            yield ("auth", "oauth", "tls"), "needs a token_url with https://"


def _is_https(url: str) -> bool:
    return url.lower().startswith("https:")


def find_exposed_secrets(document: Document, pipes: PipeFile) -> list[Problem]:
    """Secrets that others may read: in `headers`, or on their way over plain http. Nothing is refused because of them."""
    found = []
    for name, pipe in pipes.pipes.items():
        for index, destination in enumerate(pipe.destinations):
            if destination.webhook is not None:
                path: KeyPath = ("pipes", name, "destinations", index, "webhook")
                found += [document.problem((*path, *key), text) for key, text in _find_exposed(destination.webhook)]
    return found


def _find_exposed(webhook: Webhook) -> Iterator[tuple[KeyPath, str]]:
    for name in webhook.headers:
        if _SECRET_NAME.search(name):
            yield (
                ("headers", name),
                f"looks like a secret, and everybody who may read this file can read it. Try: auth: {_suggest(name)}",
            )
    if webhook.auth is None:
        return
    urls: dict[KeyPath, str] = {("url",): webhook.url}
    if webhook.auth.oauth is not None:
        urls["auth", "oauth", "token_url"] = webhook.auth.oauth.token_url
    for key, url in urls.items():
        if not _is_https(url) and not is_loopback_url(url):
            yield key, "the secret of auth goes over plain http, which others on the way can read. Try: https://"


def _suggest(name: str) -> str:
    if name.lower() == "authorization":
        return "{bearer: {file: receiver.token}}"
    return f"{{header: {{name: {name}, value: {{file: receiver.key}}}}}}"
