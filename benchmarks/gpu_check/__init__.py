"""The first minutes on a GPU, as one command."""
