"""The command `batchery`: its group, and the subcommands that need only a client."""
