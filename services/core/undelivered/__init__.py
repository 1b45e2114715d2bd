"""Events that are not delivered yet or never: what they carry, how many wait, dead letters and their causes."""
