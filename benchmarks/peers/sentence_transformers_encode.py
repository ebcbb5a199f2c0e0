"""sentence-transformers' `encode`, which sorts by length itself."""

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.peers.text_peer import arguments, serve, timed


class Encode:
    """One `encode` for all texts."""

    def __init__(self, model: str, device: str, dtype: str, batch_size: int) -> None:
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        options = {"dtype": kinds[dtype]}
        self._model: Any = SentenceTransformer(model, device=device, model_kwargs=options)
        self._model.max_seq_length = 256
        self._batch_size = batch_size

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeds all texts."""
        return self._model.encode(
            list(texts),
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )


if __name__ == "__main__":
    options = arguments()
    serve(timed(Encode(options.model, options.device, options.dtype, options.batch_size)))
