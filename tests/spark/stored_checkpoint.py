"""A pipe's checkpoint in the bucket of tests, as somebody sees it who runs none of its drivers."""

from typing import Any

import orjson

from tests.support.object_store import BUCKET, ObjectStoreServer


class StoredCheckpoint:
    """Of this pipe, below this place of the bucket."""

    def __init__(self, server: ObjectStoreServer, place: str, pipe: str) -> None:
        self._client, self._folder = server.client(), f"{place}/{pipe}"

    def claim(self) -> int:
        """The highest one; 0 before the first."""
        return max((int(name) for name in self._names("claims") if name.isdigit()), default=0)

    def holder(self) -> int | None:
        """The id of the process that took this claim; None before the first, and once it was released."""
        name = f"{self.claim()}.alive"
        if name not in self._names("claims"):
            return None
        found: int = orjson.loads(self._read(f"claims/{name}"))["pid"]
        return found

    def plans(self) -> list[Any]:
        """The ends of the planned batches, as Spark wrote them, as far as it keeps them."""
        return [orjson.loads(self._read(f"offsets/{batch}").splitlines()[2]) for batch in self._batches("offsets")]

    def has_batch_at_work(self) -> bool:
        """Whether a batch is planned, and not done yet."""
        planned = self._batches("offsets")  # first: it may be done by the next look
        return planned[-1:] > self._batches("commits")[-1:]

    def _batches(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self._names(folder))

    def _names(self, folder: str) -> list[str]:
        prefix = f"{self._folder}/{folder}/"
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [name for each in found if (name := each["Key"].removeprefix(prefix))]

    def _read(self, name: str) -> bytes:
        found: bytes = self._client.get_object(Bucket=BUCKET, Key=f"{self._folder}/{name}")["Body"].read()
        return found
