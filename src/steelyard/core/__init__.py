"""Nouns that cross between rooms: sampling, requests, steps, time, hashes. No torch, no clock."""
