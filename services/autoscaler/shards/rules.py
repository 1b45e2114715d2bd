"""The numbers of the shard policy, with what each is for. Times in seconds, loads in shards: 1 is what one shard takes."""

from dataclasses import dataclass

DAY_S = 86_400.0
QUOTA_S = DAY_S + 60.0
"""How long an update counts: the service's day begins when it takes the request, and its clock is not ours."""


@dataclass(frozen=True, slots=True)
class Rules:
    """high: a shard above it is too full, now or as expected. target: what no shard should have after an update.
    low: what no shard may have after merging, at the highest load of the last `calm` seconds.
    lead: how far ahead a full shard must be seen: an update and the figures after it take so long. size_for: how far
    ahead an update must last where all shards grow. calm: two cool-downs: the least time between opposite updates.
    cover: how long figures must have been taken since the last change. outlook: how far ahead the day's pattern must be
    quiet before shards are merged. fullness: what a shard that refuses is taken to be asked for, of what it takes.
    updates: in a rolling day, the service's quota. reserve: how many of them are not for merging. step: how many times the
    shards an update is counted on to give, where those left must lead back to what the last day had.
    plenty: with as many left the rules `_with_plenty` hold; `target_with_plenty` only while no shard refuses.
    worth: the share of the shards that a merge must save.
    """

    high: float = 0.9
    target: float = 0.78
    target_with_plenty: float = 0.84
    low: float = 0.68
    low_with_plenty: float = 0.75
    lead: float = 300.0
    size_for: float = 1_800.0
    calm: float = 600.0
    cover: float = 45.0
    outlook: float = 3_600.0
    fullness: float = 2.0
    updates: int = 10
    plenty: int = 7
    reserve: int = 2
    step: float = 1.8
    worth: float = 0.2
    worth_with_plenty: float = 0.05


RULES = Rules()
