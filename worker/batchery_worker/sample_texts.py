"""Texts that are there wherever Python is: to show, to measure and to check with."""

from pydoc_data.topics import topics


def paragraphs() -> list[str]:
    """The text that every Python carries: its language reference, in pieces of mixed length."""
    pieces = (piece.strip() for text in topics.values() for piece in text.split("\n\n"))
    return list(dict.fromkeys(piece for piece in pieces if any(map(str.isalnum, piece))))
