"""Which shapes of forward passes are captured: as long as it is right, and pays."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from batchery_worker.models.graphs import Graph, Runs, Values
from batchery_worker.models.library import reason
from batchery_worker.models.padded import Padded
from batchery_worker.models.random_texts import RandomTexts
from batchery_worker.models.shapes import Shape
from batchery_worker.models.tokenizer import Prepared

logger = logging.getLogger(__name__)

#: Longest that all captures of a model may take, in seconds: a start shall not wait for more.
CAPTURE_S = 10.0

#: Share of the time of the smallest usual pass that a graph may take. All passes take as long as
#: that one until computing takes longer than launching; from there on a graph saves nothing.
PAYS = 0.9

#: Passes per measurement, of which the fastest counts.
REPEATS = 5


class Capture:
    """Captures the forward passes of one model.

    Attributes:
        graphs: What was captured, by shape.
        why: Why there are no more of them; empty where all shapes are captured.
    """

    def __init__(
        self,
        padded: Padded,
        values: Values,
        texts: RandomTexts,
        tolerance: float,
        *,
        make: Callable[..., Runs] = Graph,
        wait: Callable[[], None] = torch.cuda.synchronize,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Captures nothing yet.

        Args:
            padded: The padded forward pass, with the attention that the model was loaded with.
            values: What the model's kind makes of a batch.
            texts: To try it with.
            tolerance: Greatest difference of the values, relative to their size.
            make: As `Graph`.
            wait: Returns when the device has computed everything.
            clock: Seconds, on any scale.
        """
        self.graphs: dict[Shape, Runs] = {}
        self.why = ""
        self._padded = padded
        self._values = values
        self._texts = texts
        self._tolerance = tolerance
        self._make = make
        self._wait = wait
        self._clock = clock
        self._pool: Any = torch.cuda.graph_pool_handle() if make is Graph else None
        #: What the smallest pass takes without a graph.
        self._usual_s = 0.0

    def run(self, wanted: Sequence[Shape]) -> None:
        """Captures shapes, smallest first, up to the first that cannot be had or does not pay."""
        end_s = self._clock() + CAPTURE_S
        for shape in wanted:
            spelled = f"{shape.texts} x {shape.length} tokens"
            if self._clock() > end_s:
                self.why = f"{CAPTURE_S:g} s were over before {spelled}"
                return
            try:
                problem = self._try(shape)
            except Exception as error:  # noqa: BLE001 (the code of any model, and of CUDA)
                problem = f"cannot be captured: {reason(error)}"
            if problem:
                self.why = f"{spelled} {problem}"
                return

    def _try(self, shape: Shape) -> str:
        """Captures a shape and keeps the graph, or says why not."""
        batch = self._texts([shape.length] * shape.texts)
        self._usual_s = self._usual_s or self._fastest_s(lambda: self._values(self._padded, batch))
        graph = self._make(self._padded.fixed(shape), self._values, batch, self._pool)
        differences = [self._difference(graph, texts) for texts in self._others(shape)]
        # NaN is neither more nor less than anything.
        if not all(each <= self._tolerance for each in differences):
            # Whatever it is, it may have gone unnoticed in the others.
            self.graphs = {}
            return f"differ by {max(differences):.1g} of their size"
        took_s = self._fastest_s(lambda: graph.run(batch))
        if took_s > PAYS * self._usual_s:
            return f"take {took_s * 1e3:.2f} ms, {self._usual_s * 1e3:.2f} do without a graph"
        self.graphs[shape] = graph
        return ""

    def _others(self, shape: Shape) -> Iterator[list[Prepared]]:
        """Other texts than those that were captured: shorter ones, and fewer."""
        for seed, texts in enumerate((shape.texts, shape.texts // 2 + 1), start=1):
            lengths = [max(1, shape.length - 3 * place - seed) for place in range(texts)]
            yield self._texts(lengths, seed)[: shape.texts]

    def _difference(self, graph: Runs, batch: list[Prepared]) -> float:
        usual = self._values(self._padded, batch).float()
        return float((graph.run(batch).float() - usual).norm() / usual.norm().clamp_min(1e-12))

    def _fastest_s(self, run: Callable[[], Any]) -> float:
        times_s = []
        for _ in range(REPEATS):
            self._wait()
            started_s = self._clock()
            run()
            self._wait()
            times_s.append(self._clock() - started_s)
        return min(times_s)


def captured(
    name: str, device: torch.device, capture: Capture, wanted: Sequence[Shape]
) -> Mapping[Shape, Runs]:
    """The graphs of a model on a CUDA device; a line in the log says which, and why no more.

    Args:
        name: For the log.
        device: Where the model is.
        capture: Of the model.
        wanted: Shapes, smallest first.
    """
    before_bytes = torch.cuda.memory_reserved(device)
    with torch.cuda.device(device), torch.inference_mode():
        capture.run(wanted)
    graphs = capture.graphs
    logger.info(
        "model %s: %d CUDA graphs, of up to %d tokens, %.0f MiB%s",
        *(name, len(graphs), max((shape.tokens for shape in graphs), default=0)),
        (torch.cuda.memory_reserved(device) - before_bytes) / 2**20,
        f"; no more, as {capture.why}" if capture.why else "",
    )
    return graphs
