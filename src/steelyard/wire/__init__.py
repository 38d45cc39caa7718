"""Messages and channels between the server and the engine."""
