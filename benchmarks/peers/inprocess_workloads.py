"""What in-process batchers run: the function, its items, and the right answer to each.

The same function for all that take one. Nothing but the standard library; MiniLM also takes numpy,
torch and transformers.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Time of one call of the function that sleeps, and of each item in it, in seconds.
CALL_S, ITEM_S = 2e-3, 0.1e-3

#: Largest difference of a number in a vector: batches of other shapes are summed up otherwise.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch function and its items."""

    name: str
    #: Takes a list, returns a list.
    function: Callable[[Sequence[Any]], Sequence[Any]]
    #: Endless items of one caller, by its number; those of two callers have different answers.
    items: Callable[[int], Iterator[Any]]
    #: Whether this is the answer to this item.
    is_right: Callable[[Any, Any], bool]
    #: Tokens of an item; None where all are alike.
    length: Callable[[Any], int] | None = None
    #: Files of the model, where there is one.
    model: str | None = None


def workload_of(name: str, options: argparse.Namespace) -> Workload:
    """Makes a workload; loads its model.

    Args:
        name: `no-op`, `sleep` or `MiniLM`.
        options: With `model`, `texts`, `vectors` and `max_tokens`, for MiniLM.
    """
    if name == "no-op":
        return Workload(name, _nothing, _numbers, lambda item, answer: bool(item == answer))
    if name == "sleep":
        return Workload(name, _sleep, _numbers, lambda item, answer: bool(-item == answer))
    return _minilm(name, options)


def _numbers(caller: int) -> Iterator[int]:
    return itertools.count(1 + caller * 10**9)


def _nothing(items: Sequence[Any]) -> Sequence[Any]:
    return items


def _sleep(items: Sequence[Any]) -> list[Any]:
    time.sleep(CALL_S + ITEM_S * len(items))
    return [-item for item in items]


def _minilm(name: str, options: argparse.Namespace) -> Workload:
    import numpy as np

    texts = json.loads(Path(options.texts).read_text(encoding="utf-8"))
    right = dict(zip(texts, np.load(options.vectors), strict=True))
    encoder = Encoder(options.model, options.max_tokens)

    def items(caller: int) -> Iterator[str]:
        # Each caller has an order of its own, the same for every system.
        return itertools.cycle(random.Random(caller).sample(texts, len(texts)))

    def is_right(text: str, vector: Any) -> bool:
        expected = right[text]
        if len(vector) != len(expected):
            return False
        return bool(abs(vector - expected).max() < TOLERANCE)

    return Workload(name, encoder.embed, items, is_right, encoder.length, options.model)


class Encoder:
    """A padded forward pass of transformers, mean pooling, vectors of length one."""

    def __init__(self, model: str, max_tokens: int) -> None:
        """Loads the model.

        Args:
            model: Its folder.
            max_tokens: Texts are cut there.
        """
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModel

        self._torch: Any = torch
        self._model: Any = AutoModel.from_pretrained(model).eval()
        # That of transformers is changed by each call, and breaks where two threads call it.
        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self._tokenizer.enable_truncation(max_tokens)
        self._counter = Tokenizer.from_str(self._tokenizer.to_str())
        self._counter.no_padding()
        self._tokenizer.enable_padding()

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._counter.encode(text))

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """One vector per text."""
        torch = self._torch
        encoded = self._tokenizer.encode_batch_fast(list(texts))
        ids = torch.tensor([each.ids for each in encoded])
        mask = torch.tensor([each.attention_mask for each in encoded])
        with torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            means = (states * weights).sum(1) / weights.sum(1)
            return list(torch.nn.functional.normalize(means).numpy())
