"""Models that a device serves: loaded, swapped, run in batches or in slots."""
