"""Copies of a fleet's data folder: made while it runs, checked, and restored into an empty folder. docs/backup.md."""
