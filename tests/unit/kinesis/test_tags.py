"""What a stream's tags say, however many there are."""

from typing import Any

from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.streams import read_tags


class _Tagged:
    """As the API: ten of the tags, in order of their names, unless more are asked for."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = sorted(tags.items())

    async def list_tags_for_stream(self, **asked: Any) -> dict[str, Any]:
        assert asked["StreamName"] == "t"
        limit = asked.get("Limit", 10)
        assert 1 <= limit <= 50, "the API takes no other"
        answer = [{"Key": key, "Value": value} for key, value in self._tags[:limit]]
        return {"Tags": answer, "HasMoreTags": len(self._tags) > limit}


async def test_every_tag_of_a_well_labelled_stream_is_read() -> None:
    """Broken: an organisation's own tags hide ours; the updates of the day and the number of partitions are forgotten."""
    tags = {f"cost-centre-{number:02}": "x" for number in range(46)} | {
        "penstock:updates": "u1",
        "penstock:partitions": "12",
    }
    assert await read_tags(_Tagged(tags), "t", Timing()) == tags
