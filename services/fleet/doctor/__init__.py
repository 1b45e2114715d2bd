"""`penstock doctor`: what is wrong with a fleet, the most probable cause first.

`collection` gathers the facts: each collector has a time limit, and one that fails is named, without an effect on the others. The
checks (`checks/`) read the facts and do nothing else. `diagnosis` puts their findings in order.
"""
