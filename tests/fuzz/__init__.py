"""Ingest against input that nobody would send on purpose."""
