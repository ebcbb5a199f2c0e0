"""Text generation through the queue: its speed, its streams, live jobs beside bulk, and resume."""
