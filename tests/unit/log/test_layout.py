"""The data folder: which are refused, who may read it, and which topic names cannot leave it."""

import stat
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import BadDataFolder, UnknownTopic
from services.core.broker.log import topics
from services.core.broker.log.data_folder import DataFolder, refuse_network


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.glusterfs", "ceph"])
def test_network_file_systems_are_refused(kind: str, tmp_path: Path) -> None:
    """If it fails, SQLite runs where locks lie, and two writers destroy the log."""
    mounts = f"/dev/vda / ext4 rw 0 0\nhost:/x {tmp_path} {kind} rw 0 0\n"
    with pytest.raises(BadDataFolder, match=r"network file system .* Try:"):
        refuse_network(tmp_path / "data", mounts)


def test_a_local_folder_below_or_beside_a_network_mount_is_fine(tmp_path: Path) -> None:
    """If it fails, a machine with any network mount cannot run the log."""
    refuse_network(tmp_path, "/dev/vda / ext4 rw 0 0\nhost:/x /mnt nfs rw 0 0\n")
    refuse_network(tmp_path, f"h:/x / nfs rw 0 0\n/dev/vda {tmp_path} ext4 rw 0 0\n")
    refuse_network(tmp_path, f"h:/x {tmp_path}-other nfs rw 0 0\n/dev/vda / ext4 rw 0 0\nbroken\n")


def test_mount_points_with_spaces_are_understood(tmp_path: Path) -> None:
    """If it fails, a share named "My Files" passes as local."""
    point = str(tmp_path / "my files").replace(" ", "\\040")
    with pytest.raises(BadDataFolder):
        refuse_network(tmp_path / "my files" / "log", f"/dev/vda / ext4 rw 0 0\nh:/x {point} cifs rw 0 0\n")


def test_only_the_owner_may_enter(tmp_path: Path) -> None:
    """If it fails, every user of the machine can read all events."""
    folder = DataFolder.prepare(tmp_path / "data")
    topics.create_topic(folder, TopicSpec("orders"))
    for path in (folder.root, folder.topics):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_an_unusable_folder_says_so(tmp_path: Path) -> None:
    """If it fails, an operator gets a traceback instead of the folder's name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadDataFolder, match="Try:"):
        DataFolder.prepare(tmp_path / "file" / "data")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "A", "a b", ".hidden", "-x", "x" * 201, "ä", "a\0b", "a\n"])
def test_bad_topic_names(name: str, tmp_path: Path) -> None:
    """If it fails, a topic's name reaches files outside of the folder."""
    folder = DataFolder.prepare(tmp_path)
    with pytest.raises(ValueError, match="topic name"):
        topics.create_topic(folder, TopicSpec(name))
    with pytest.raises(UnknownTopic):
        folder.topic(name)
