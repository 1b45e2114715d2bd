"""Sends events from files to ingest, for `penstock send` and the demo."""
