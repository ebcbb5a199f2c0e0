"""What the gateway knows of itself, of Redis and of the workers."""
