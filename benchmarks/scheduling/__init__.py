"""Whose turn it is, measured with a real worker: live jobs among bulk, classes and tenants."""
