"""A classifier behind one batcher: requests that come together share forward passes.

`python bert_proxy.py MODEL` runs it; MODEL is an id of the Hugging Face hub, or a local folder.
"""

import asyncio
import sys
from time import perf_counter

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from batchery import batched


class BertProxy:
    """Classifies texts."""

    def __init__(self, name: str) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSequenceClassification.from_pretrained(name)
        self.model = model.to(self.device).eval()

    # Texts of like length go together: else all are padded to the longest one.
    @batched(max_batch_size=64, length=len)
    def infer(self, texts: list[str]) -> list[list[float]]:
        """The probabilities of each text, in order."""
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        with torch.inference_mode():
            logits = self.model(**inputs.to(self.device)).logits
        probabilities: list[list[float]] = logits.softmax(-1).tolist()
        return probabilities


async def main(name: str) -> None:
    """Asks with more and more callers at once."""
    proxy = BertProxy(name)
    async with proxy.infer as infer:
        await infer.acall("the first call is slower")
        for callers in (1, 5, 150):
            texts = [f"this is test text {number}" for number in range(callers)]
            began_s = perf_counter()
            found = await asyncio.gather(*map(infer.acall, texts))
            took_s = perf_counter() - began_s
            print(f"{callers} callers: {took_s:.3f} s, {len(found)} answers")
        print(f"{infer.stats.items} texts in {infer.stats.batches} batches")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
