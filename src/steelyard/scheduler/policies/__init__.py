"""Orders in which requests are served, as injected objects."""
