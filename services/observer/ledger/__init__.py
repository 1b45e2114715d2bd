"""The join: which events of which minute each step settled, and which are missing. See docs/adr/0009-ledger.md."""
