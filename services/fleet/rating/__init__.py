"""`penstock rate`: measures how much load one instance of a service handles on this machine."""
