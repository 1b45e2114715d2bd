"""Notes that are created once: in a folder, and in an object store (moto's). A lost answer, a race, and a damaged one."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from services.core.aws_emulator import CREDENTIALS
from services.core.broker.errors import BrokerError, NewerFormat
from services.core.broker.kinesis import bucket
from services.core.broker.kinesis.bucket import Store
from spark.sources.ends import (
    EndNotes,
    EndsDamaged,
    EndsMissing,
    Place,
    ShardEnd,
    decode_note,
    encode_note,
    next_plan,
    open_notes,
    pack_plan,
    plan_of,
    share_tasks,
)
from spark.sources.offsets import offsets_of
from spark.sources.shards import ShardPosition, pack_shards

BIG = 1 << 200


@pytest.fixture(scope="module")
def s3() -> Iterator[Store]:
    """A store on this machine with the bucket `checkpoints`."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        put, puts = S3Response.put_object, threading.Lock()

        def put_one_by_one(response: Any) -> Any:  # moto looks whether there is a key, and stores one, in two steps
            with puts:
                return put(response)

        environment.setattr(S3Response, "put_object", put_one_by_one)
        host, port = server.get_host_and_port()
        store = Store("us-east-1", f"http://{host}:{port}", path_style=True)
        bucket._client(store).create_bucket(Bucket="checkpoints")
        yield store
        bucket._client(store).close()
        bucket._client.cache_clear()
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def notes(request: pytest.FixtureRequest, tmp_path: Path) -> EndNotes:
    checkpoint = f"file://{tmp_path}" if request.param == "folder" else f"s3a://checkpoints/{tmp_path.name}"
    store = request.getfixturevalue("s3") if request.param == "s3" else Store()
    found = open_notes(Place(checkpoint, store), "ends/orders")
    found.prepare()
    return found


def test_a_note_is_stored_once(notes: EndNotes) -> None:
    """If this fails, two attempts of a task hand out different records."""
    assert notes.find("1-a-0") is None
    with ThreadPoolExecutor(8) as pool:
        stored = set(pool.map(lambda n: notes.fix("1-a-0", b"%d" % n), range(24)))
    assert len(stored) == 1
    assert {notes.find("1-a-0")} == stored
    assert notes.fix("1-a-0", b"later") in stored
    notes.fix("2-b-0", b"")
    assert sorted(notes.list()) == ["1-a-0", "2-b-0"]
    notes.remove(["1-a-0", "0-never-0"])
    assert notes.list() == ["2-b-0"]


def test_a_lost_answer_is_no_other_note(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a task whose request is repeated takes its own note for another attempt's, or fails."""
    found = open_notes(Place("s3a://checkpoints/lost", s3), "ends/orders")
    client = bucket._client(s3)
    put, lost = client.put_object, list[Any]()

    def lose(**asked: Any) -> Any:
        put(**asked)
        if not lost:
            lost.append(asked)
            return put(**asked)  # as the SDK repeats it
        raise botocore.exceptions.ReadTimeoutError(endpoint_url="s3")

    monkeypatch.setattr(client, "put_object", lose)
    assert found.fix("1-a-0", b"mine") == b"mine"
    with pytest.raises(BrokerError, match="create an object in S3"):
        found.fix("1-a-1", b"mine")
    monkeypatch.setattr(client, "put_object", put)
    assert found.fix("1-a-1", b"of the next attempt") == b"mine"


def test_a_folder_that_is_not_shared_is_an_error(tmp_path: Path) -> None:
    """If this fails, an executor keeps its notes for itself, and the driver plans the same records again and again."""
    elsewhere = open_notes(Place(f"file://{tmp_path}/elsewhere"), "ends/orders")
    with pytest.raises(EndsMissing, match="all hosts of the cluster mount"):
        elsewhere.find("1-a-0")
    with pytest.raises(EndsMissing):
        elsewhere.fix("1-a-0", b"")
    assert elsewhere.list() == []
    for wrong in ("", "hdfs://name/checkpoints", "relative/path"):
        with pytest.raises(EndsMissing, match="Try: file:///path or s3a"):
            open_notes(Place(wrong), "ends/orders")


def test_a_note_that_cannot_be_read_is_an_error() -> None:
    """If this fails, a damaged note is taken for one of other ends, and records are skipped."""
    end = ShardEnd(
        topic="orders", shard=3, next=str(BIG + 1), settled=5, ended=True, retention=7, begun=str(BIG), records=2
    )
    content = encode_note([end])
    assert decode_note("n", content) == [end]
    assert end.position == ShardPosition(BIG + 1, 5, ended=True, retention=7, begun=BIG)
    with pytest.raises(EndsDamaged, match="restoring the checkpoint"):
        decode_note("n", content[:-3])
    with pytest.raises(NewerFormat):
        decode_note("n", content.replace(b'"version":1', b'"version":2'))


def test_earlier_versions_read_an_offset_with_a_plan() -> None:
    """If this fails, there is no way back to 0.1, or it begins behind a batch that it has not read."""
    begins = pack_shards({"orders": ("a", {3: ShardPosition(BIG, 1)})})
    plan = next_plan("ends/orders", None, [[("orders", 3)]])
    offset = json.loads(json.dumps(pack_plan(begins, plan)))
    assert plan_of(offset) == plan
    assert offsets_of(offset, "orders") == ("a", {3: BIG}), "0.1 reads the batch of the plan again"
    assert plan_of(begins) is None
    following = next_plan("ends/orders", plan, [])
    assert following.number == plan.number + 1
    assert following.token != plan.token


def test_shards_are_shared_by_tasks() -> None:
    """If this fails, a task reads a shard that another one reads, or one task has all the work."""
    shards = [(("s", n), 5_000 if n < 3 else 10) for n in range(8)]
    tasks = share_tasks(shards, 3, 5_000)
    assert sorted(shard for task in tasks for shard in task) == [("s", n) for n in range(8)]
    assert [sum(number < 3 for _, number in task) for task in tasks] == [1, 1, 1]
    assert len(share_tasks(shards, 100, 5_000)) == 3
    assert len(share_tasks([(("s", n), 1) for n in range(8)], 4, 5_000)) == 1
