"""What is synced before a batch becomes visible: a power cut must not leave an output that the checkpoint does not know."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spark.jobs.checkpoint import Checkpoint
from spark.sources import log, offsets
from spark.sources.offsets import sync_batch


def test_notes_of_a_batch_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a power cut loses what a batch was to read, or the state it left, but not its output."""
    wanted = [
        "offsets/5",
        "offsets/.5.crc",
        "commits/4",
        "commits/.4.crc",
        "state/0/1/6.delta",
        "state/0/1/6_0a1b.changelog",
        "state/0/1/.6.delta.crc",
    ]
    others = ["offsets/4", "commits/3", "state/0/1/5.delta", "state/0/1/16.delta", "metadata"]
    for name in (*wanted, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    synced: list[str] = []
    monkeypatch.setattr(offsets, "sync", lambda path: synced.append(str(path.relative_to(tmp_path))))
    sync_batch(tmp_path, 5)
    assert sorted(synced) == sorted([*wanted, "offsets", "commits", "state/0/1"])
    assert max(map(synced.index, wanted)) < min(map(synced.index, ["offsets", "commits", "state/0/1"]))


def test_sink_syncs_the_checkpoint_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the streaming sink makes a batch visible that a power cut takes from the checkpoint."""
    calls: list[object] = []
    monkeypatch.setattr(offsets, "sync_batch", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(log, "store_batch", lambda *_: calls.append("visible"))
    options = {"broker": "log:///log", "topic": "t", "writer": "w", "checkpointlocation": f"file://{tmp_path}"}
    log.open_writer(options).commit([], 7)
    assert calls == [(tmp_path, 7), "visible"]


def test_two_queries_write_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the two queries of a pipe that store their first batches at the same time make one of them fail."""
    monkeypatch.setattr("spark.jobs.checkpoint.HadoopFolder", lambda _session, _path: None)
    no_session: Any = None
    checkpoint = Checkpoint(no_session, f"file://{tmp_path}")
    with ThreadPoolExecutor(4) as threads:
        for written in [threads.submit(checkpoint.write_note, "note.json", number) for number in range(400)]:
            written.result()
    assert (tmp_path / "note.json").read_bytes().isdigit()
