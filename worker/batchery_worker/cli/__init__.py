"""Subcommands of `batchery` that need a worker's packages."""
