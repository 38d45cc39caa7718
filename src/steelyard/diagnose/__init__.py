"""Which resource binds a server, from its counters or a saved report, with the numbers that say so. Knows no engine."""
