"""Rules by which waiting requests join the running ones, as injected objects."""
