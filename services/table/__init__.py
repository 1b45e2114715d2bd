"""Serves compacted streams as tables: the newest event of each key, over HTTP. Start at `app.py`; the decisions are in
docs/adr/0020-tables.md.

A follower for each stream reads it without a group into a file of SQLite. Each transaction has rows and the positions behind
them. So a killed process goes on where it stopped, and a file that is copied is a table up to its positions.
"""
