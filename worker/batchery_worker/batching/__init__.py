"""When and how items share a forward pass: pure policy."""
