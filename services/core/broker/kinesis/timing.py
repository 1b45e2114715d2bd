"""How long things may take. Fixed for production; only tests shorten them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds.

    lease: how long a silent member keeps its shards. beat: between two looks at the lease table. sync: between two looks at
    the stream's shards. drain: how long on_revoke may take. request: how long one request may go unanswered.
    settle: how long a stream may take to be made, deleted or resharded. subscription: how long a shard is pushed to us in one
    answer; the service ends it after 300.
    """

    lease: float = 10.0
    beat: float = 1.0
    sync: float = 5.0
    drain: float = 35.0
    request: float = 7.0
    settle: float = 180.0
    subscription: float = 290.0
