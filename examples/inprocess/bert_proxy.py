"""A classifier behind one batcher: requests that come together share forward passes.

`python bert_proxy.py MODEL` runs it; MODEL is an id of the Hugging Face hub, or a local folder.
"""

import asyncio
import sys
from time import perf_counter

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from batchery import Batcher


class BertProxy(Batcher):
    """Classifies texts."""

    def __init__(self, name: str) -> None:
        # Texts of like length go together: else all are padded to the longest one.
        super().__init__(max_batch_size=64, length=len)
        self.name = name
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(self) -> None:
        """Loads the model, before the first batch."""
        self.tokenizer = AutoTokenizer.from_pretrained(self.name)
        model = AutoModelForSequenceClassification.from_pretrained(self.name)
        self.model = model.to(self.device).eval()

    def infer(self, texts: list[str]) -> list[list[float]]:
        """The probabilities of each text, in order."""
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        with torch.inference_mode():
            logits = self.model(**inputs.to(self.device)).logits
        probabilities: list[list[float]] = logits.softmax(-1).tolist()
        return probabilities


async def main(name: str) -> None:
    """Asks with more and more callers at once."""
    async with BertProxy(name) as proxy:
        await proxy.acall("the first call loads the model")
        for callers in (1, 5, 150):
            texts = [f"this is test text {number}" for number in range(callers)]
            began_s = perf_counter()
            found = await asyncio.gather(*map(proxy.acall, texts))
            took_s = perf_counter() - began_s
            print(f"{callers} callers: {took_s:.3f} s, {len(found)} answers")
        print(f"{proxy.stats.items} texts in {proxy.stats.batches} batches")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
