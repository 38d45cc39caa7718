"""Attention and small operators: one protocol, a plain reference, and fast backends."""
