"""`penstock doctor`: what is wrong with a fleet, the most probable cause first.

`look` gathers the facts: each look has a time limit, and one that fails is named, without an effect on the others. The checks
(`checks.py`) read the facts and do nothing else. `diagnosis` puts their findings in order.
"""
