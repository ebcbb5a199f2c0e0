"""The device processes as the worker sees them: found, started, watched, replaced."""
