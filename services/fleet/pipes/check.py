"""Checks a pipe file, and the files that it names, before anything starts."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from services.core.http.net_guard import NetPolicy, parse_endpoints, parse_networks
from services.core.pipe_file.columns import find_column_mistakes
from services.core.pipe_file.destination_check import check_destinations, find_exposed_secrets
from services.core.pipe_file.pipes import PipeFile, read_pipes, read_what_is_right
from services.core.pipe_file.snapshot import Contents, read_contents
from services.core.pipe_file.stream import NO_SINGLE_FIELD
from services.core.pipe_file.table import not_on_cluster
from services.core.security.credentials import BadCredential, read_value
from services.core.yaml_source import BadConfiguration, Document, Problem
from services.fleet.pipes.expected_modes import is_cluster
from services.fleet.problem import CommandFailed

_READINGS = 5
_NO_CODE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|--[^\n]*|/\*.*?\*/", re.DOTALL)
_INNERMOST = re.compile(r"\(([^()]*)\)")
_FROM = re.compile(
    r"\bFROM\b(.*?)(?:\b(?:FROM|WHERE|GROUP|ORDER|HAVING|LIMIT|UNION|EXCEPT|INTERSECT|MINUS|WINDOW|SELECT)\b|$)",
    re.IGNORECASE | re.DOTALL,
)
_BETWEEN = re.compile(r",|\bJOIN\b", re.IGNORECASE)
_HYPHENATED = re.compile(r"\s*(\w+(?:-\w*)+)")


def check_pipe_file(
    path: Path, *, listen: str = "", allow_networks: str = "", secrets: bool = True, master: str = "auto"
) -> PipeFile:
    """The checked pipe file. Raises BadConfiguration with every mistake in shape, references, destinations, secrets and files.

    listen: our own ingest, which is refused as a destination. secrets: whether to read secrets and certificates, too. master:
    Spark's, of the transforms. Blocking.
    """
    try:
        allowed = parse_networks(allow_networks)
    except ValueError as error:
        raise BadConfiguration([Problem("--allow-networks", "", str(error))]) from None
    document, pipes, problems = read_what_is_right(path)
    policy = NetPolicy(allow=allowed, own=parse_endpoints(listen))
    if pipes is not None:
        problems += check_destinations(document, pipes, policy, os.environ if secrets else None)
        problems += _missing_files(document, pipes)
        problems += _bad_columns(document, pipes)
        problems += _tables_out_of_reach(document, pipes, master)
        problems += _unquoted_names(document, pipes)
        problems += _unusable_passwords(document, pipes) if secrets else []
    if problems or pipes is None:
        raise BadConfiguration(problems)
    return pipes


def find_warnings(path: Path) -> list[Problem]:
    """Warnings: secrets that others may read, patterns in place of fields, and orders without a key. Nothing is refused
    because of them. Blocking. Raises BadConfiguration."""
    document, pipes, _ = read_pipes(path)
    return [
        *find_exposed_secrets(document, pipes),
        *_patterns_for_fields(document, pipes),
        *_orders_without_key(document, pipes),
    ]


def _patterns_for_fields(document: Document, pipes: PipeFile) -> list[Problem]:
    """Ids, keys and times that look like a pattern of several fields. A field may have such a name, so they are no mistakes."""
    found = []
    for name, stream in pipes.streams.items():
        for use, place in (("id", stream.id), ("key", stream.key), ("time", stream.time)):
            if isinstance(place, str) and "{" in place:
                remedy = NO_SINGLE_FIELD if use == "id" else "the name of one field"
                text = f"{place} is taken for the name of one field: several are not combined. Try: {remedy}"
                found.append(document.problem(("streams", name, use), text))
    return found


def _orders_without_key(document: Document, pipes: PipeFile) -> list[Problem]:
    """Destinations that keep the order per key, of pipes without a transform whose streams have no rule for a key."""
    found = []
    for name, pipe in pipes.pipes.items():
        streams = [pipes.streams[source] for source in pipe.sources]
        if pipe.transform is not None or any(one.key is not None or one.topic is not None for one in streams):
            continue  # a record of a topic of others has Kafka's key
        for index, destination in enumerate(pipe.destinations):
            if destination.webhook is not None and destination.webhook.order == "key":
                text = (
                    f"{' and '.join(pipe.sources)} {'has' if len(pipe.sources) == 1 else 'have'} no `key`, so only events "
                    "that bring one (`partitionkey` of a CloudEvent) are kept in order. Try: `key: FIELD` in the stream"
                )
                found.append(document.problem(("pipes", name, "destinations", index, "webhook", "order"), text))
    return found


def _unusable_passwords(document: Document, pipes: PipeFile) -> list[Problem]:
    """Passwords of databases that cannot be read."""
    found = []
    for name, table in pipes.tables.items():
        if table.jdbc is not None and table.jdbc.password is not None:
            try:
                read_value(table.jdbc.password, document.path.parent, os.environ)
            except BadCredential as error:
                found.append(document.problem(("tables", name, "jdbc", "password"), str(error)))
    return found


def _tables_out_of_reach(document: Document, pipes: PipeFile, master: str) -> list[Problem]:
    """Tables that a transform reads and that the executors of a cluster do not see."""
    if not is_cluster(master):
        return []
    read = {table for pipe in pipes.pipes.values() if pipe.transform is not None for table in pipe.transform.tables}
    return [
        document.problem(("tables", name, "parquet"), not_on_cluster(master))
        for name, table in pipes.tables.items()
        if name in read and table.is_on_this_host
    ]


def _bad_columns(document: Document, pipes: PipeFile) -> list[Problem]:
    """Columns of streams and tables that Spark would refuse, as far as that shows without it."""
    timed = {
        source
        for pipe in pipes.pipes.values()
        for source in pipe.sources
        if pipe.transform is not None and pipe.transform.watermark is not None
    }
    found = {("streams", name): one.columns for name, one in pipes.streams.items() if one.columns is not None}
    found |= {("tables", name): one.columns for name, one in pipes.tables.items()}
    return [
        document.problem((*place, "columns"), text)
        for place, columns in found.items()
        for text in find_column_mistakes(columns, timed=place in {("streams", name) for name in timed})
    ]


def _unquoted_names(document: Document, pipes: PipeFile) -> list[Problem]:
    """Names of views with a hyphen that SQL takes for a subtraction. Names inside quotes and comments do not count."""
    found = []
    for name, pipe in pipes.pipes.items():
        sql = _NO_CODE.sub(" ", (pipe.transform.sql if pipe.transform is not None else None) or "")
        views = {*pipe.sources, *pipes.tables}
        for view in sorted(views & _hyphenated_names(sql)):
            text = f"{view} is written without back-quotes. Try: FROM `{view}`"
            found.append(document.problem(("pipes", name, "transform", "sql"), text))
    return found


def _hyphenated_names(sql: str) -> set[str]:
    """Names with a hyphen where SQL has a view: behind FROM, JOIN, or a comma of FROM; also in queries inside of others."""
    queries = []
    while inner := _INNERMOST.search(sql):
        queries.append(inner[1])
        sql = f"{sql[: inner.start()]} {sql[inner.end() :]}"
    named = [part for query in (*queries, sql) for clause in _FROM.findall(query) for part in _BETWEEN.split(clause)]
    return {found[1] for part in named if (found := _HYPHENATED.match(part))}


def _missing_files(document: Document, pipes: PipeFile) -> list[Problem]:
    """Python transforms whose file is missing."""
    return [
        document.problem(("pipes", name, "transform", "python"), f"there is no file {file}")
        for name, file in python_files(document.path, pipes).items()
        if not file.is_file()
    ]


def python_files(path: Path, pipes: PipeFile) -> dict[str, Path]:
    """The Python files of transforms, by pipe. Their paths are relative to the pipe file."""
    modules = {
        name: (pipe.transform.python or "").rpartition(":")[0] for name, pipe in pipes.pipes.items() if pipe.transform
    }
    return {name: path.parent / module for name, module in modules.items() if module.endswith(".py")}


def read_checked(path: Path, config: str | None, check: Callable[[], PipeFile]) -> tuple[PipeFile, Contents]:
    """The result of `check`, and the content of every configuration file of the services; both belong to the same version.

    Blocking. Raises CommandFailed when the files keep changing, and the errors of `check`.
    """
    settings = [Path(config)] if config else []
    for _ in range(_READINGS):
        pipes = check()
        try:
            contents = read_contents([path, *settings, *python_files(path, pipes).values()])
        except OSError as error:
            raise CommandFailed(f"{error.filename} cannot be read: {error.strerror}", status=2) from error
        if check() == pipes and contents == read_contents(map(Path, contents)):
            return pipes, contents
    raise CommandFailed(f"{path} changed again and again while it was read", "again, when nobody writes to it")
