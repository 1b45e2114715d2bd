"""The collectors: each asks one part of the fleet, and writes its answer into the facts."""
