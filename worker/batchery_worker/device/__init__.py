"""The device process, and what runs in it."""
