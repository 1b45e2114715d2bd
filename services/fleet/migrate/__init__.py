"""Moves a stream to another broker while the fleet runs (`services.core.homes` has the states, docs/migrating.md the page)."""
