"""Moves a stream to another broker while the fleet runs (states: `services.core.control.homes`; page: docs/migrating.md)."""
