"""The story of one event, from its id: where it was accepted, its outcome at each step, where it is now.

Nothing is indexed by id. `search` reads a bounded range of the topics, `reports` the reports of the nodes, `find` joins them,
`event_story` and `lane_story` make sentences of them. The package writes nothing and joins no group. The observer and the command
line use it.
"""
