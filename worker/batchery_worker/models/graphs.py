"""Small forward passes as CUDA graphs: the host launches one thing, not hundreds of kernels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from batchery_worker.models.forward import Forward
from batchery_worker.models.padded import Fixed
from batchery_worker.models.shapes import Shape, rounded
from batchery_worker.models.tokenizer import Prepared

#: Passes before a capture, in which libraries choose their kernels and get their memory.
WARM_UP_PASSES = 3

#: Makes the values of a batch, one row per text.
Values = Callable[[Forward, Sequence[Prepared]], Tensor]


class Runs(Protocol):
    """A forward pass of one shape."""

    def run(self, batch: Sequence[Prepared]) -> Tensor:
        """The values of a batch that has room, one row per text."""


class Graph:
    """The forward pass of one shape, captured."""

    def __init__(
        self, forward: Fixed, values: Values, batch: Sequence[Prepared], pool: Any
    ) -> None:
        """Captures it on the current device.

        Args:
            forward: Of that shape.
            values: What the model's kind makes of a batch.
            batch: Any that has room.
            pool: Memory that all graphs share, as never two of them run at a time.
        """
        self._forward = forward
        forward.fill(batch)
        # Captured on another stream than the default one, and so is what leads up to it.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_PASSES):
                values(forward, batch)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._values = values(forward, batch)

    def run(self, batch: Sequence[Prepared]) -> Tensor:
        """The values of a batch that has room, one row per text."""
        self._forward.fill(batch)
        self._graph.replay()
        # The next pass writes to the same place.
        return self._values[: len(batch)].clone()


class Graphed:
    """A forward pass that takes a graph where one has room, and else runs as it would without."""

    def __init__(self, forward: Forward, graphs: Mapping[Shape, Runs]) -> None:
        """Puts graphs in front of a forward pass.

        Args:
            forward: For all other shapes.
            graphs: By shape, of what the model's kind makes of a batch.
        """
        self._forward = forward
        self._graphs = graphs
        self.name = f"{forward.name}, small passes by CUDA graphs"
        self.pads = forward.pads

    def vectors(self, batch: Sequence[Prepared], pooling: str) -> Tensor:
        """Pooled token vectors, (B, D) float32, in batch order."""
        graph = self._fitting(batch)
        return self._forward.vectors(batch, pooling) if graph is None else graph.run(batch)

    def logits(self, batch: Sequence[Prepared]) -> Tensor:
        """What the model's head says, (B, C) float32, in batch order."""
        graph = self._fitting(batch)
        return self._forward.logits(batch) if graph is None else graph.run(batch)

    def _fitting(self, batch: Sequence[Prepared]) -> Runs | None:
        longest = max(prepared.shape[1] for prepared in batch)
        shape = rounded(len(batch), longest, self._graphs)
        return None if shape is None else self._graphs[shape]
