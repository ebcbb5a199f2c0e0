"""Texts of chosen lengths in tokens: what the engine's workloads are made of."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from benchmarks.hardware import describe_lengths

#: Tokens that every text has besides its words: the first and the last.
SPECIAL_TOKENS = 2

#: Shortest and longest text, in tokens; MiniLM was trained on no longer ones.
SHORTEST, LONGEST = 3, 256


def _short(_: random.Random) -> int:
    return 16


def _long(_: random.Random) -> int:
    return 128


def _lognormal(random: random.Random) -> int:
    return round(random.lognormvariate(2.9, 0.9))


def _bimodal(random: random.Random) -> int:
    # Four questions for each paragraph.
    return random.randint(8, 16) if random.random() < 0.8 else random.randint(160, 240)


#: Name of a workload -> draws the length of one text, in tokens.
WORKLOADS: Mapping[str, Callable[[random.Random], int]] = MappingProxyType(
    {"uniform 16": _short, "uniform 128": _long, "log-normal": _lognormal, "bimodal": _bimodal}
)


def read_texts(workload: str, count: int, model: Path, longest: int = LONGEST) -> list[str]:
    """Draws the texts of a workload; the same every time.

    Args:
        workload: One of `WORKLOADS`.
        count: How many.
        model: Folder with the tokenizer that counts.
        longest: Maximum length of a text, in tokens.

    Returns:
        English words from the Python reference, as many as make the length that was drawn.
    """
    words = _words(_tokenizer(model))
    draw = random.Random(workload)
    lengths = (WORKLOADS[workload](draw) for _ in range(count))
    return [_text(words, min(longest, max(SHORTEST, length))) for length in lengths]


def lengths_of(texts: Sequence[str], model: Path) -> list[int]:
    """Tokens of each text, special ones included."""
    return [len(each) for each in _tokenizer(model).encode_batch_fast(list(texts))]


def describe_texts(
    workload: str, count: int, model: Path, longest: int = LONGEST
) -> Mapping[str, Any]:
    """How long the texts are that `read_texts` draws, in tokens."""
    return describe_lengths(lengths_of(read_texts(workload, count, model, longest), model))


def reference_words() -> Sequence[str]:
    """Words of the Python reference, in order."""
    return [word for text in topics.values() for word in text.split() if word.isalpha()]


def _tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _words(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Words of the reference, again and again, each with its tokens."""
    distinct = list(dict.fromkeys(reference_words()))
    counts = [len(each) for each in tokenizer.encode_batch_fast(distinct, add_special_tokens=False)]
    return itertools.cycle(
        (word, count) for word, count in zip(distinct, counts, strict=True) if count
    )


def _text(words: Iterator[tuple[str, int]], tokens: int) -> str:
    room = tokens - SPECIAL_TOKENS
    chosen = []
    while room:
        word, count = next(words)
        if count <= room:
            chosen.append(word)
            room -= count
    return " ".join(chosen)
