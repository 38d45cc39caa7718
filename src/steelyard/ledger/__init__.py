"""Accounts of time and memory that add up. Pure arithmetic on what the engine recorded."""
