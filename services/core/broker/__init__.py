"""The broker layer: one contract, three backends.

Start at `contract` (the words and the promises), then `producer` (the portable sending part: batches, order, retry,
limits) and `offset_tracker` (which offset may be committed). `connect.open_broker` picks a backend by URL.
"""
