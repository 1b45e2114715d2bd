"""Reports of the events that each node settled: a crash neither hides a loss nor invents one. See docs/adr/0009-ledger.md."""
