"""`penstock demo`: runs the whole fleet on real events and counts the outcome of each."""
