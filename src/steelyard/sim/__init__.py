"""Runners and clocks without a model: the shadow KV oracle, scripted text, virtual time."""
