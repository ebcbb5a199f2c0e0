"""Ours in this process: `batchery.Engine`, with torch or with ONNX Runtime."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from batchery import Engine, ModelSettings
from benchmarks.engine.onnx_file import export_onnx
from benchmarks.peers.text_peer import arguments, serve, take_stdout, timed


class EngineEmbedder:
    """One engine, loaded."""

    def __init__(self, settings: ModelSettings, device: str) -> None:
        self._engine = Engine(settings, device=device).__enter__()

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeds all texts."""
        return [each["vector"] for each in self._engine.submit_many(texts).result()]


def main() -> None:
    """Answers requests until the input ends."""
    options, out = arguments(), take_stdout()
    settings = ModelSettings(kind="embedding", model=options.model, dtype=options.dtype)

    @cache
    def load(engine: str) -> EngineEmbedder:
        if engine != "onnx":
            return EngineEmbedder(settings, options.device)
        copy = Path(tempfile.mkdtemp(prefix="batchery-bench-onnx-"), "model")
        shutil.copytree(options.model, copy)
        export_onnx(copy)
        changed = {"engine": "onnx", "model": str(copy), "dtype": "auto"}
        return EngineEmbedder(settings.model_copy(update=changed), options.device)

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return timed(load(request["engine"]))(request)

    serve(answer, out)


if __name__ == "__main__":
    main()
