"""A pipe's checkpoint in the bucket of tests, as somebody sees it who runs none of its drivers."""

from typing import Any

import orjson

from tests.support.object_store import BUCKET, ObjectStoreServer


class StoredCheckpoint:
    """Of this pipe, below this place of the bucket."""

    def __init__(self, server: ObjectStoreServer, place: str, pipe: str) -> None:
        self._server, self._folder = server, f"{place}/{pipe}"
        self._client = server.client()

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
        batches = sorted(int(name) for name in self._names("offsets"))
        return [orjson.loads(self._read(f"offsets/{batch}").splitlines()[2]) for batch in batches]

    def _names(self, folder: str) -> list[str]:
        return [key.rpartition("/")[2] for key in self._server.keys(f"{self._folder}/{folder}/")]

    def _read(self, name: str) -> bytes:
        found: bytes = self._client.get_object(Bucket=BUCKET, Key=f"{self._folder}/{name}")["Body"].read()
        return found
