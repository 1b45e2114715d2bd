"""Where a partition that is written to lies: a fixed point in the space of hash keys, one per partition.

A topic of N partitions has N equal slots of the 2^128 hash keys, and whatever is appended to partition p goes to the
middle of slot p, by explicit hash key. Whichever shard holds that point takes it. So a split or merge, ours or anybody's,
moves partitions as a whole, and the order per key holds: parents are drained before their children are read.
N is the stream's tag `PARTITIONS_TAG`; a stream without one has as many partitions as open shards.

Readers see shards. A new stream's shards have the partitions' numbers; after a split or merge they have others.
"""

from collections.abc import Sequence

from services.core.broker.kinesis.shards import Shard

PARTITIONS_TAG = "penstock:partitions"
HASH_KEYS = 1 << 128


def hash_key_of(partition: int, partitions: int) -> int:
    """The middle of slot `partition` among `partitions`."""
    return (2 * partition + 1) * HASH_KEYS // (2 * partitions)


def shard_of(hash_key: int, shards: Sequence[Shard]) -> Shard | None:
    """The open shard that takes this hash key; None for a moment while the stream is being resharded."""
    return next((shard for shard in shards if shard.is_open and shard.first_key <= hash_key <= shard.last_key), None)


def next_split(shards: Sequence[Shard], partitions: int) -> tuple[Shard, int] | None:
    """(shard, hash key at which its second half begins) of one split on the way to a shard for each slot; None: enough.

    Cuts between slots, halving their number, so that a doubling takes one split per shard.
    """
    for shard in sorted((one for one in shards if one.is_open), key=lambda one: one.first_key):
        inside = [p for p in range(partitions) if shard.first_key <= hash_key_of(p, partitions) <= shard.last_key]
        if len(inside) > 1:
            return shard, inside[len(inside) // 2] * HASH_KEYS // partitions
    return None
