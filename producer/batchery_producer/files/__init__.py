"""Rows of a dataset, read from and written to files of many formats."""
