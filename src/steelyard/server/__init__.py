"""The OpenAI-compatible HTTP server. Never imports the engine and never loads torch."""
