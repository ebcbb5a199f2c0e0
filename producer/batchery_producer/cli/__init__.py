"""Commands: `batchery submit`, `batchery serve` and `batchery key`."""
