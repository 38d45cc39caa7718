"""Kernel and offline throughput measurements, in process, and what the machine can do."""
