"""Who computes what in the next step. Pure: time, cost and policy are passed in."""
