"""Where partitions lie, and what resharding does to them."""

from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.kinesis.streams import HASH_KEYS, Shard, hash_key_of, next_split, shard_of


def uniform(count: int) -> list[Shard]:
    """As CreateStream cuts the hash keys."""
    cuts = [HASH_KEYS * n // count for n in range(count + 1)]
    return [Shard(n, (), cuts[n], cuts[n + 1] - 1, is_open=True) for n in range(count)]


@given(st.integers(1, 60))
def test_each_partition_of_a_new_stream_has_the_shard_of_its_number(count: int) -> None:
    """If it fails, a partition is written under one number and read under another, or two share a shard."""
    shards = uniform(count)
    assert [shard_of(hash_key_of(p, count), shards) for p in range(count)] == shards


@given(st.integers(1, 20), st.integers(1, 40))
def test_splitting_ends_with_a_shard_for_each_partition(before: int, more: int) -> None:
    """If it fails, a topic that was grown keeps partitions that share a shard's capacity, or splitting does not end."""
    shards, wanted = uniform(before), before + more
    splits = 0
    while (step := next_split(shards, wanted)) is not None:
        splits += 1
        assert splits <= wanted
        shard, cut = step
        assert shard.first_key < cut <= shard.last_key, "what SplitShard allows"
        shards[shards.index(shard)] = shard._replace(is_open=False)
        number = len(shards)
        shards.append(Shard(number, (shard.number,), shard.first_key, cut - 1, is_open=True))
        shards.append(Shard(number + 1, (shard.number,), cut, shard.last_key, is_open=True))
    places = [shard_of(hash_key_of(p, wanted), shards) for p in range(wanted)]
    assert len({place.number for place in places if place is not None}) == wanted
