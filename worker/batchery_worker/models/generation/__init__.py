"""Text generation: jobs join and leave a batch that is running, and are answered token by token."""
