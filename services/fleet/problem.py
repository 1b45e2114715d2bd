"""The error of a command."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import aiohttp


class CommandFailed(Exception):
    """The command failed. what: the failure and its place; remedy: a thing to try; both for a person.

    status: the exit status: 1 failed, 2 wrong command or configuration, 130 stopped by Ctrl-C.
    """

    def __init__(self, what: str, remedy: str = "", *, status: int = 1) -> None:
        super().__init__(what)
        self.what, self.remedy, self.status = what, remedy, status


SHOWN_NAMES = 30


def unknown_name(
    what: str, name: str, known: Iterable[str], meant: Iterable[str] = (), *, none: str = "none yet"
) -> CommandFailed:
    """The error of a name that nobody has, as `what` says. Adds the name that was probably meant.

    known: the names that there are. meant: those that the name may stand for, where they differ from these.
    """
    names = list(dict.fromkeys(known))
    close = get_close_matches(name, list(meant) or names, n=1)
    listed = ", ".join(names[:SHOWN_NAMES]) + (
        f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    )
    what += f"; did you mean {close[0]}?" if close else ""
    return CommandFailed(what, f"one of: {listed or none}", status=2)


def why_no_answer(error: Exception) -> str:
    """The reason why an HTTP request has no answer, for a person. aiohttp's own text names TLS also if the request uses none."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        place = f"{error.host}:{error.port}"
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return f"nobody listens on {place}" if refused else f"no connection to {place}: {error.strerror}"
    return str(error) or type(error).__name__


def unreadable_file(path: Path, error: OSError) -> CommandFailed:
    """The error of a file that a person named. Adds the file of its folder that was probably meant. Blocking."""
    what = f"{path} cannot be read: {error.strerror}"
    if not isinstance(error, FileNotFoundError):
        remedy = "a file, not a folder" if isinstance(error, IsADirectoryError) else "a file that this user may read"
        return CommandFailed(what, remedy, status=2)
    folder = path.parent
    try:
        names = sorted(one.name for one in folder.iterdir())
    except OSError:
        return CommandFailed(what, f"a folder that exists: {folder} does not", status=2)
    close = get_close_matches(path.name, names, n=1)
    what += f"; did you mean {folder / close[0]}?" if close else ""
    return CommandFailed(what, f"ls {folder}", status=2)
