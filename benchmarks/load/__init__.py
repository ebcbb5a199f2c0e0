"""How long jobs wait under load, and what memory does meanwhile."""
