"""Offsets as ints: a Kinesis sequence number, and which of the records within one stored entry.

offset = sequence number << 20 | index within the entry. An entry holds at most 1 MiB, so fewer records than 2^20. The
index is what the KCL calls the sub-sequence number. Ordered within a shard, and from a shard to its children.
"""

SUB_BITS = 20
_SUB_MASK = (1 << SUB_BITS) - 1


def offset_of(sequence: str | int, sub: int = 0) -> int:
    """The offset of the record at index `sub` of the entry with this sequence number."""
    return int(sequence) << SUB_BITS | sub


def split_offset(offset: int) -> tuple[str, int]:
    """(sequence number as the service writes it, index within the entry)."""
    return str(offset >> SUB_BITS), offset & _SUB_MASK
