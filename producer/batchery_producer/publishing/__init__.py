"""Sends jobs to Redis in bulk, each exactly once."""
