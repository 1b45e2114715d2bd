"""The broker layer: one small contract, three kinds of backend.

Start at `contract` (the words and what every backend promises), then `producer` (the portable sending part: group
commit, retry, bounds) and `watermark` (which offset may be committed). `connect.open_broker` picks a backend by URL.
"""
