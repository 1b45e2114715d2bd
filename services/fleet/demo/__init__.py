"""`penstock demo`: the whole fleet on real events, and the count of what became of each of them."""
