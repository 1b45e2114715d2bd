"""Every byte of every file of a small log: one bit of it flipped, the file cut off there. Nothing may vanish in silence."""

import random
from collections.abc import Callable, Iterator

import pytest

from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.repair import verify
from tests.faults.log_small import Copy, account, check_append, check_group, check_repair, make_log, quick_folder
from tests.support.damage_table import Damaged, RecordProperty

FILES: dict[str, Callable[[DataFolder], str]] = {
    "topics/orders.db": account,
    "topics/orders.db-wal": account,
    "topics/orders.hwm": account,
    "groups.db": check_group,
    "groups.db-wal": check_group,
    "groups.hwm": check_group,
}
"""What is stored in each, and how to ask for it. The topic's description is in the first."""
EMPTY = ("topics/orders.lock", "groups.lock", "groups.alive", "catalog.lock", "keeper.lock")
SHARED = ("topics/orders.db-shm", "groups.db-shm", "groups.bell")
STRIPES = 4
"""Each file's positions are shared by so many tests, so that workers share the work."""
FURTHER = 13
"""One in so many loud positions is also appended to, verified and repaired."""

Copies = tuple[dict[str, bytes], Copy]


@pytest.fixture(scope="module")
def copies() -> Iterator[Copies]:
    """The sound files, and a folder with a copy to damage."""
    with quick_folder() as root:
        files = make_log(root / "live")
        sound = {name: data for name, data in files.items() if not name.endswith("-shm")}
        copy = Copy(root / "copy", sound | dict.fromkeys((name for name in files if name.endswith("-shm")), None))
        yield files, copy


def flipped(data: bytes, position: int) -> bytes:
    """One bit of this byte is another; neighbours lose different ones."""
    return data[:position] + bytes([data[position] ^ 1 << position * 5 % 8]) + data[position + 1 :]


def cut(data: bytes, position: int) -> bytes:
    """The file ends before this byte."""
    return data[:position]


def test_undamaged_is_whole(copies: Copies) -> None:
    """If it fails, the other tests here say nothing: the oracle itself is wrong."""
    _, copy = copies
    folder = copy.damage("catalog.lock", b"")
    assert account(folder) == check_group(folder) == "harmless"
    assert verify(folder.root).is_sound


@pytest.mark.parametrize("stripe", range(STRIPES))
@pytest.mark.parametrize("fault", [flipped, cut])
@pytest.mark.parametrize("file", FILES)
def test_every_position(
    copies: Copies, file: str, fault: Callable[[bytes, int], bytes], stripe: int, record_property: RecordProperty
) -> None:
    """If it fails, a disk error loses or alters acknowledged events or a group's place, and nobody says which."""
    files, copy = copies
    data, check = files[file], FILES[file]
    positions = range(stripe, len(data), STRIPES)
    row = Damaged(file, fault.__name__, len(positions))
    for position in positions:
        damaged = fault(data, position)
        try:
            outcome = check(copy.damage(file, damaged))
            row.count(outcome)
            if outcome == "loud" and row.loud % FURTHER == 1:
                look_further(copy, file, damaged, check)
        except Exception as error:
            raise AssertionError(f"{file}, byte {position} {fault.__name__}: {error}") from error
    assert row.loud > 5, "no damage bit: the test proves nothing"
    record_property(*row.as_property())


def look_further(copy: Copy, file: str, damaged: bytes, check: Callable[[DataFolder], str]) -> None:
    """Appending, `verify` and `repair` agree with what the reader said."""
    if check is account:
        check_append(copy.damage(file, damaged))
        check_repair(copy.damage(file, damaged))
    else:
        assert not verify(copy.damage(file, damaged).root).is_sound, "the group complains, verify does not"


@pytest.mark.parametrize("file", [*EMPTY, *SHARED])
def test_files_that_hold_nothing(copies: Copies, file: str) -> None:
    """If it fails, a file that only serves living processes can take stored records with it."""
    files, copy = copies
    chance = random.Random(file)
    whole = files.get(file) or bytes(8)
    trials: list[bytes | None] = [None, b"", chance.randbytes(len(whole)), whole[: len(whole) // 2]]
    trials += [flipped(whole, chance.randrange(len(whole))) for _ in range(100)]
    for damaged in trials:
        folder = copy.damage(file, damaged)
        assert account(folder) == check_group(folder) == "harmless"


@pytest.mark.parametrize("file", [name for name in FILES if not name.endswith(".db")])
def test_lost_file(copies: Copies, file: str) -> None:
    """If it fails, a deleted file takes with it what it held, in silence."""
    _, copy = copies
    assert FILES[file](copy.damage(file, None)) == "loud"


def test_lost_databases(copies: Copies) -> None:
    """If it fails, a topic or all groups begin anew, empty, and nobody learns what was lost."""
    _, copy = copies
    assert account(copy.damage("topics/orders.db", None)) == "loud"
    assert check_group(copy.damage("groups.db", None)) == "loud"
    assert not verify(copy.folder.root).is_sound
