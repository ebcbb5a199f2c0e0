"""The gateway beside another model server, and under attack."""
