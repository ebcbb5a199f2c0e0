"""infinity_emb's engine: its own queue, its own tokenizer threads, its own forward pass."""

from typing import Any

from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from benchmarks.peers.inprocess_peer import Entrance, main
from benchmarks.peers.inprocess_workloads import Workload


async def start(workload: Workload, batch_size: int) -> Entrance:
    """Loads the model."""
    engine: Any = AsyncEmbeddingEngine.from_args(
        EngineArgs(
            model_name_or_path=workload.model,
            engine="torch",
            device="cpu",
            dtype="float32",
            batch_size=batch_size,
            bettertransformer=False,
            model_warmup=False,
        )
    )
    await engine.astart()

    async def acall(text: str) -> Any:
        vectors, _ = await engine.embed(sentences=[text])
        return vectors[0]

    return Entrance(acall=acall)


if __name__ == "__main__":
    main("infinity_emb", {"engine": start})
