"""The version of this Penstock, and the words for data that a newer one wrote.

Data that outlives a process, or passes between two, has the version of its format in it; docs/upgrading.md lists all of them. A
format's version changes only when an older reader would misread the data. A field that is added keeps the version: readers pass
over fields that they do not know. So a reader meets three cases: it knows everything; it passes over additions; or it refuses,
with `newer_format`. Where only a part is unknown (one outcome of a report), the reader keeps the rest and counts that part
(`metrics.NOT_UNDERSTOOD`).
"""

VERSION = "0.2.0.dev0"
"""The only place of it: the package and the bill of materials take it from here. `infra/dev/release.py` changes it."""


def newer_format(subject: str, found: object, known: int, writer: object = "") -> str:
    """The text of a refusal. subject: of the sentence, e.g. "topic 'orders'". found, known: the format's version in the data, and
    the newest that this Penstock reads. writer: the version of the Penstock that wrote it, where the data has it."""
    wrote = f"Penstock {writer}" if isinstance(writer, str) and writer else "a newer Penstock"
    start = (
        f"Penstock {writer} or newer" if isinstance(writer, str) and writer else "the version that ran before, or newer"
    )
    return (
        f"{subject} has format {found}, written by {wrote}; this is Penstock {VERSION}, which reads format {known}. Try: start "
        f"{start}; docs/upgrading.md has the way back"
    )
