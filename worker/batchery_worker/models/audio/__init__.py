"""Kinds of model whose items are sounds."""
