"""A method that embeds sentences: called with one, with many, from threads and from asyncio.

`python embedder.py MODEL` runs it; MODEL is an id of the Hugging Face hub, or a local folder.
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sentence_transformers import SentenceTransformer

from batchery import batched


class SentenceEmbedder:
    """Embeds sentences."""

    def __init__(self, name: str) -> None:
        self.model = SentenceTransformer(name)

    @batched(max_batch_size=64, small_batch_threshold=8)
    def embed_sentences(self, sentences: list[str]) -> list[Any]:
        """One vector per sentence, in order."""
        return list(self.model.encode(sentences))


async def ask(embedder: SentenceEmbedder) -> int:
    """Asks from coroutines."""
    one = await embedder.embed_sentences.acall("This is a test sentence.")
    many = await embedder.embed_sentences.acall([f"Sentence number {n}." for n in range(100)])
    return len(one) * len(many)


def main(name: str) -> None:
    """Asks in every way."""
    embedder = SentenceEmbedder(name)
    print(embedder.embed_sentences("This is a test sentence.").shape)
    print(len(embedder.embed_sentences([f"Sentence number {n}." for n in range(1000)])), "vectors")
    print(asyncio.run(ask(embedder)), "numbers")
    with ThreadPoolExecutor(50) as threads:
        found = list(threads.map(embedder.embed_sentences, ["from", "many", "threads"] * 50))
    print(len(found), "vectors from threads")
    print(f"{embedder.embed_sentences.stats.mean_batch_size:.0f} sentences per batch")


if __name__ == "__main__":
    main(sys.argv[1])
