"""`penstock group`: moves the groups of destinations (reset, skip), and lets a transform begin again."""
