"""Pictures through the whole system, beside a bare loop with a DataLoader."""
