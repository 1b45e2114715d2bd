"""Which events each node settled, told so that a crash neither hides a loss nor invents one. See docs/adr/0009-ledger.md."""
