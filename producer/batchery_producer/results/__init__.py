"""Awaits the results of many jobs at once."""
