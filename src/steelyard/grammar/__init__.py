"""Structured output: what a client asks for as a grammar, checked in the server; compiled and walked in the engine."""
