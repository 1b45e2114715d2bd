"""The positions of destinations and transforms, for `penstock group`: shows them, moves them back (reset) or forward (skip)."""
