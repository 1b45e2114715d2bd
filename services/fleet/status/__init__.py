"""`penstock status`: `reading` asks the processes and the broker, `view` makes the tables."""
