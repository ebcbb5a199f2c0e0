"""Small forward passes as CUDA graphs: the host launches one thing, not hundreds of kernels."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from batchery_worker.models.forward import Forward
from batchery_worker.models.forward.padded import Padded
from batchery_worker.models.forward.probe_texts import RandomTexts
from batchery_worker.models.loading.source import reason
from batchery_worker.models.loading.tokenizer import Prepared

logger = logging.getLogger(__name__)

#: Texts and tokens per text. Powers of two: a pass has at most four times the tokens that it needs,
#: which costs next to nothing where launching costs more than computing.
TEXTS = (1, 2, 4, 8, 16, 32)

LENGTHS = (16, 32, 64, 128, 256, 512)

#: Largest shape, in tokens: beyond that every device computes longer than the host launches.
MAX_TOKENS = 8192

#: Passes before a capture, in which libraries choose their kernels and get their memory.
WARM_UP_PASSES = 3

#: Makes the values of a batch, one row per text.
Values = Callable[[Forward, Sequence[Prepared]], Tensor]

#: Longest that all captures of a model may take, in seconds: a start shall not wait for more.
CAPTURE_S = 10.0

#: Share of the time of the smallest usual pass that a graph may take. All passes take as long as
#: that one until computing takes longer than launching; from there on a graph saves nothing.
PAYS = 0.9

#: Passes per measurement, of which the fastest counts.
REPEATS = 5


class Shape(NamedTuple):
    """The shape of a padded forward pass.

    Attributes:
        texts: How many.
        length: Tokens of each.
    """

    texts: int
    length: int

    @property
    def tokens(self) -> int:
        """All of them, padding counted."""
        return self.texts * self.length


def shapes(max_length: int | None) -> list[Shape]:
    """All shapes of a model, smallest first.

    Args:
        max_length: Longest text in tokens; None where nothing limits it.
    """
    # The longest that a model takes is a shape, too: it may take no more.
    lengths = {length for length in LENGTHS if length <= (max_length or LENGTHS[-1])}
    if max_length is not None and max_length < LENGTHS[-1]:
        lengths.add(max_length)
    all_of_them = (Shape(texts, length) for texts in TEXTS for length in lengths)
    return sorted(
        (shape for shape in all_of_them if shape.tokens <= MAX_TOKENS),
        key=lambda shape: (shape.tokens, shape),
    )


def rounded(texts: int, length: int, there: Collection[Shape]) -> Shape | None:
    """The smallest of some shapes that has room; None where none has."""
    fit = [shape for shape in there if shape.texts >= texts and shape.length >= length]
    return min(fit, key=lambda shape: (shape.tokens, shape), default=None)


class Runs(Protocol):
    """A forward pass of one shape."""

    def run(self, batch: Sequence[Prepared]) -> Tensor:
        """The values of a batch that has room, one row per text."""


class Fixed(Padded):
    """A padded forward pass of one shape; what is computed is what `fill` has last left there."""

    def __init__(self, padded: Padded, shape: Shape) -> None:
        """Shares the model of a padded pass, and its way to the device."""
        super().__init__(
            padded._model,
            padded._device,
            padding=padded._padding,
            side=padded._side,
            to_device=padded._to_device,
        )
        self._shape = shape
        size = (len(self._padding) + 1, *shape)
        self._there = torch.zeros(size, dtype=torch.int64, device=self._device)

    def fill(self, batch: Sequence[Prepared]) -> None:
        """Puts a batch into its place, after what was queued on the device before.

        Args:
            batch: At most as many texts, and none of more tokens, than the shape has.
        """
        # A text of nothing but padding would see nothing.
        more = [batch[-1]] * (self._shape.texts - len(batch))
        self._there.copy_(self._send([*batch, *more], self._shape.length), non_blocking=True)

    def _inputs(self, batch: Sequence[Prepared]) -> dict[str, Tensor]:  # noqa: ARG002
        return self._named(self._there)


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
        graph = self._make(Fixed(self._padded, shape), self._values, batch, self._pool)
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
