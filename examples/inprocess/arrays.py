"""Functions over arrays: items of any length are padded into one, and each gets its own rows.

`python arrays.py MODEL` runs it; MODEL is an id of the Hugging Face hub, or a local folder.
"""

import asyncio
import sys
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from batchery import batched

Features = dict[str, torch.Tensor]


class Encoder:
    """A transformer, and three ways to ask it."""

    def __init__(self, name: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModel.from_pretrained(name).eval()

    def tokenize(self, text: str) -> Features:
        """The features of one text, each of the shape [tokens]."""
        features = self.tokenizer(text, return_tensors="pt", truncation=True)
        return {name: values[0] for name, values in features.items()}

    @batched(pad={"input_ids": 0, "token_type_ids": 0}, mask="attention_mask")
    def embed(self, features: Features) -> torch.Tensor:
        """One vector per text: [texts, numbers]."""
        with torch.inference_mode():
            hidden = self.model(**features).last_hidden_state
        return mean(hidden, features["attention_mask"])

    @batched(pad={"input_ids": 0, "token_type_ids": 0}, mask="attention_mask", trim=True)
    def embed_tokens(self, features: Features) -> dict[str, torch.Tensor]:
        """One vector per token of each text, and its tokens: two outputs."""
        with torch.inference_mode():
            hidden = self.model(**features).last_hidden_state
        return {"vectors": hidden, "tokens": features["input_ids"]}

    @batched(pad={"input_ids": 0, "token_type_ids": 0}, mask="attention_mask")
    async def first_and_mean(self, features: Features) -> tuple[torch.Tensor, torch.Tensor]:
        """Two vectors per text, from a coroutine function."""
        with torch.inference_mode():
            hidden = self.model(**features).last_hidden_state
        await asyncio.sleep(0)
        return hidden[:, 0], mean(hidden, features["attention_mask"])


def mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of each text's own tokens: with padding, it would depend on the other texts."""
    own = mask[:, :, None]
    return (hidden * own).sum(1) / own.sum(1)


async def ask(encoder: Encoder, items: list[Features]) -> tuple[Any, ...]:
    """Asks from coroutines."""
    return tuple(await asyncio.gather(*map(encoder.first_and_mean.acall, items)))


def main(name: str) -> None:
    """Asks in every way."""
    encoder = Encoder(name)
    texts = ["short", "a text of some more words", "one that is longer than all the others here"]
    items = [encoder.tokenize(text) for text in texts]
    print(tuple(encoder.embed(items[0]).shape))
    print([tuple(vector.shape) for vector in encoder.embed(items)])
    found = encoder.embed_tokens(items)
    print([len(each["vectors"]) == len(each["tokens"]) for each in found])
    pairs = asyncio.run(ask(encoder, items))
    print([len(outputs) for outputs in pairs])
    alone = torch.stack([encoder.embed(item) for item in items])
    for together in (encoder.embed(items), [vector for _, vector in pairs]):
        print(torch.allclose(torch.stack(together), alone, atol=1e-5))


if __name__ == "__main__":
    main(sys.argv[1])
