"""infinity_emb's engine: its own queue, its own tokenizer threads, its own forward pass."""

from typing import Any

from benchmarks.peers.infinity_embed import make_engine
from benchmarks.peers.inprocess_peer import Entrance, main
from benchmarks.peers.inprocess_workloads import Workload


async def start(workload: Workload, batch_size: int) -> Entrance:
    """Loads the model."""
    assert workload.model is not None
    engine = make_engine(workload.model, "cpu", "fp32", batch_size)
    await engine.astart()

    async def acall(text: str) -> Any:
        vectors, _ = await engine.embed(sentences=[text])
        return vectors[0]

    return Entrance(acall=acall)


if __name__ == "__main__":
    main({"engine": start})
