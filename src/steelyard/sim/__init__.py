"""Runners without a model, for tests and for serving scripted text, and a clock that stands still. No torch."""
