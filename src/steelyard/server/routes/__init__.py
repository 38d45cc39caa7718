"""The HTTP surface, one subject a file. Handlers say what a route means; everything shared is in `server`."""
