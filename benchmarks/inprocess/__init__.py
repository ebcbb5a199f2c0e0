"""Batchers without a broker, in the process of their callers: ours beside others."""
