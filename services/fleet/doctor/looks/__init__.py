"""The looks: each asks one part of the fleet, and writes its answer into the facts."""
