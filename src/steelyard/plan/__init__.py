"""Arithmetic from tensor sizes to bytes, FLOPs, time and capacity. Standard library only."""
