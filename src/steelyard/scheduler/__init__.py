"""Who runs in the next step: one token budget, chunked prefill, preemption. Time, cost and policy are passed in."""
