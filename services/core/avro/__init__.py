"""Avro schemas: parse them, name them by content, compare them, and offer the change that makes them compatible.

Functions over text. No module here reads a file or the network. Only `repair.py` reads a clock: it ends its search after some
seconds of CPU time, so a slow machine may not find a patch that a fast one finds. `parsing.py` reads a schema, `protocol.py`
and `idl.py` read whole protocols, `forms.py` gives fingerprints, `compatibility.py` compares, `repair.py` offers changes. Every
input is bounded (`json_document.py`).
"""
