"""The `steelyard` command, one file a subcommand."""
