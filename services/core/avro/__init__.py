"""Avro schemas: parse them, name them by content, compare them, and offer the change that makes them compatible.

Pure functions over text. Nothing here reads a file, a network or a clock. `parsing.py` reads a schema, `protocol.py` and `idl.py`
read whole protocols, `forms.py` gives fingerprints, `compatibility.py` compares, `repair.py` offers changes. Every input is
bounded (`json_document.py`).
"""
