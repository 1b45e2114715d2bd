"""The prefix of a fleet's names, where several fleets share a Kafka cluster or an AWS account.

It is an option of the broker's URL: `kafka://host:9092?prefix=acme.`, `kinesis://eu-west-1?prefix=acme.`. The backend puts it in
front of every name that it sends: topics, streams, groups, lease tables. It leaves out the names of other fleets and removes its
own prefix from the others. Above the backend a fleet sees the names of its pipe file, and nothing of other fleets.

The embedded log has no prefix: each fleet has a folder of its own.
"""

import re
from collections.abc import Iterable

OPTION = "prefix"
LONGEST = 32
"""With it, the longest name of a stream has 102 characters. Kinesis allows 128, Kafka 249."""

_PREFIX = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 2}}}\.")
_OWN = ("penstock.", "penstock-")
_MARK = re.compile(r"(.+\.)penstock\.(?:telemetry|control|groups)")
"""A topic that only Penstock makes, with the prefix of its fleet."""
_OF_PIPE = re.compile(r"[a-z0-9][a-z0-9_-]*\.(?:out|dead|retry|parked)")


def check_prefix(text: str) -> str:
    """The prefix, "" for none. Raises ValueError, which does not quote it.

    It ends with a dot, which no name of a stream, pipe or destination has: names of fleets with and without it differ.
    """
    if text and (not _PREFIX.fullmatch(text) or text.startswith(_OWN)):
        raise ValueError(
            f"{OPTION} in a broker URL has at most {LONGEST} letters, digits, -, _ and dots, begins with a letter or digit, not "
            f"with penstock. or penstock-, and ends with a dot. Try: {OPTION}=acme."
        )
    return text


def find_own(names: Iterable[str], prefix: str) -> list[str]:
    """The names on the cluster of this fleet's topics, among all `names` there. A fleet without a prefix may also find topics
    that are no fleet's."""
    found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    others = tuple({mark[1] for name in found if (mark := _MARK.fullmatch(name))})
    return [prefix + name for name in found if not name.startswith(others) or _OF_PIPE.fullmatch(name)]
