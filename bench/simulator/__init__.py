"""Traffic replayed against scaling policies in simulated time: `python -m bench.simulator`."""
