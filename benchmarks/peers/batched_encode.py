"""mixedbread's `batched`: one call per text, gathered into batches behind a decorator."""

import asyncio
from collections.abc import Sequence
from typing import Any

import batched

from benchmarks.peers.sentence_transformers_encode import Encode
from benchmarks.peers.text_peer import arguments, serve, timed


class Batched:
    """sentence-transformers behind `batched`, asked for all texts at once, each by itself."""

    def __init__(self, model: str, device: str, dtype: str, batch_size: int) -> None:
        # Its futures belong to the loop of its first call.
        self._loop = asyncio.new_event_loop()
        encode = Encode(model, device, dtype, batch_size)
        self._call: Any = batched.aio.dynamically(
            encode.embed, batch_size=batch_size, timeout_ms=5.0
        )

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeds all texts."""
        return self._loop.run_until_complete(self._gather(texts))

    async def _gather(self, texts: Sequence[str]) -> Any:
        return await asyncio.gather(*(self._call(text) for text in texts))


if __name__ == "__main__":
    options = arguments()
    serve(timed(Batched(options.model, options.device, options.dtype, options.batch_size)))
