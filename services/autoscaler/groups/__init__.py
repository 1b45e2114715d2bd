"""Each service its own group of instances, scaled on the group's average CPU."""
