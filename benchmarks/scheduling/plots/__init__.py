"""The pictures of docs/scheduling.md: each policy with and without itself, in virtual time."""
