"""The text that every Python carries: its language reference, in pieces of mixed length."""

from pydoc_data.topics import topics


def paragraphs() -> list[str]:
    """Its pieces, each once, in order."""
    pieces = (piece.strip() for text in topics.values() for piece in text.split("\n\n"))
    return list(dict.fromkeys(piece for piece in pieces if any(map(str.isalnum, piece))))
