"""The fast way to store results: one script for a whole batch."""
