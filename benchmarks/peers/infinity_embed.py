"""infinity_emb's engine in this process: its own queue, tokenizer threads and batches."""

import asyncio
from collections.abc import Sequence
from typing import Any

from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from benchmarks.peers.text_peer import arguments, serve, timed

#: Their names of number formats.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def make_engine(model: str, device: str, dtype: str, batch_size: int) -> Any:
    """An engine that is not started yet."""
    kind, _, number = device.partition(":")
    return AsyncEmbeddingEngine.from_args(
        EngineArgs(
            model_name_or_path=model,
            engine="torch",
            device=kind,
            device_id=[int(number)] if number else [],
            dtype=DTYPES[dtype],
            batch_size=batch_size,
            bettertransformer=False,
            model_warmup=False,
        )
    )


class Infinity:
    """One engine on one event loop."""

    def __init__(self, model: str, device: str, dtype: str, batch_size: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = make_engine(model, device, dtype, batch_size)
        self._loop.run_until_complete(self._engine.astart())

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeds all texts."""
        vectors, _ = self._loop.run_until_complete(self._engine.embed(sentences=list(texts)))
        return vectors


if __name__ == "__main__":
    options = arguments()
    serve(timed(Infinity(options.model, options.device, options.dtype, options.batch_size)))
