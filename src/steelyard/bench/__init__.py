"""Measuring a server over HTTP: load, records, statistics, validity, reports. Knows no server from the inside."""
