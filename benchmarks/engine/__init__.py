"""What is left of a model's own speed."""
