"""Small forward passes as CUDA graphs: the host launches one graph, not hundreds of kernels."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchery_worker.models.forward import Forward, RandomTexts, Reading, size, worst_difference
from batchery_worker.models.forward.padded import Padded
from batchery_worker.models.source import reason
from batchery_worker.models.tokenizer import Prepared

logger = logging.getLogger(__name__)

#: Texts and tokens per text of the shapes. With powers of two, a pass has at most four times the
#: tokens that it needs. That costs little where launching costs more than computing.
TEXTS = (1, 2, 4, 8, 16, 32, 64)

LENGTHS = (16, 32, 64, 128, 256, 512)

#: Maximum shape, in tokens: for larger ones every device computes longer than the host launches.
MAX_TOKENS = 8192

#: Passes before a capture: in them, libraries choose kernels and allocate memory.
WARM_UP_PASSES = 3

#: Makes the values of a batch, one row per text.
Values = Callable[[Forward, Sequence[Prepared]], Tensor]

#: Maximum time for all captures of a model, in seconds: the start of the worker waits for it.
CAPTURE_S = 10.0

#: Maximum time of a graph, as a share of the time of the smallest pass without one. Passes take
#: that time until computing takes longer than launching. Then a graph saves nothing.
MAX_TIME_SHARE = 0.9

#: Passes per measurement; the fastest one counts.
REPEATS = 5

#: Texts whose results say what size results have: those of a single text may be almost zero.
SCALE_TEXTS = 8


class Shape(NamedTuple):
    """The shape of a padded forward pass.

    Attributes:
        texts: Number of texts.
        length: Tokens of each text.
    """

    texts: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all texts, padding counted."""
        return self.texts * self.length


def shapes(max_length: int | None) -> list[Shape]:
    """All shapes of a model whose texts have at most so many tokens, smallest first."""
    # The maximum length of the model is a shape, too: the next power of two may be too long.
    lengths = {length for length in LENGTHS if length <= (max_length or LENGTHS[-1])}
    if max_length is not None and max_length < LENGTHS[-1]:
        lengths.add(max_length)
    all_of_them = (Shape(texts, length) for texts in TEXTS for length in lengths)
    return sorted(
        (shape for shape in all_of_them if shape.tokens <= MAX_TOKENS),
        key=lambda shape: (shape.tokens, shape),
    )


def rounded(texts: int, length: int, there: Collection[Shape]) -> Shape | None:
    """The smallest shape that has room; None if none has."""
    fit = [shape for shape in there if shape.texts >= texts and shape.length >= length]
    return min(fit, key=lambda shape: (shape.tokens, shape), default=None)


class Fixed(Padded):
    """A padded forward pass of one shape, over the batch of the last `fill`."""

    def __init__(self, padded: Padded, shape: Shape) -> None:
        """Shares all that a padded pass has."""
        vars(self).update(vars(padded))
        # A graph has one mask for all batches.
        self.masks = padded.masks._replace(none=False)
        self._shape = shape
        size = (len(self._padding) + 1, *shape)
        self._there = torch.zeros(size, dtype=torch.int64, device=self.device)

    def fill(self, batch: Sequence[Prepared]) -> None:
        """Copies a batch, which must fit, into place, behind what is queued on the device."""
        # A text of nothing but padding would give NaN: the last text is repeated.
        more = [batch[-1]] * (self._shape.texts - len(batch))
        self._there.copy_(self._send([*batch, *more], self._shape.length), non_blocking=True)

    def _inputs(self, batch: Sequence[Prepared]) -> tuple[dict[str, Tensor | None], Tensor]:  # noqa: ARG002
        return self._named(self._there, is_full=False), self._there[-1]


class Graph:
    """The forward pass of one shape, captured."""

    def __init__(
        self, forward: Fixed, values: Values, batch: Sequence[Prepared], pool: Any
    ) -> None:
        """Captures it on the current device.

        Args:
            forward: The pass of that shape.
            values: What is read of the model's output for a batch.
            batch: Any batch that fits.
            pool: Memory that all graphs share, because only one of them runs at a time.
        """
        self._forward = forward
        forward.fill(batch)
        # CUDA captures on a stream other than the default one, and warms up there. Torch's own is
        # made once per process, on the device that was the first to capture.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_PASSES):
                values(forward, batch)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        self._values: Tensor = capture_into(self._graph, pool, side, lambda: values(forward, batch))

    def run(self, batch: Sequence[Prepared]) -> Tensor:
        """The values of a batch that has room, one row per text."""
        self._forward.fill(batch)
        self._graph.replay()
        # The next pass overwrites the values.
        return self._values[: len(batch)].clone()


def capture_into(graph: Any, pool: Any, side: Any, compute: Callable[[], Any]) -> Any:
    """Captures what is launched; if that fails, the process goes on as if it had not been tried.

    Other threads may call CUDA meanwhile, such as one that copies a batch: in torch's usual mode
    CUDA would refuse their calls, or end the capture.

    Where CUDA refuses to end a capture, torch leaves the capture's stream current, and up to 2.11
    its allocator takes the capture for running: it would free no memory that was used on more than
    one stream, such as all inputs and results, and could not give back any. The device's random
    numbers stay in the capture, too, and the next draw, such as that of a model's random weights,
    would raise an error.
    """
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
        ):
            return compute()
    except BaseException:
        # Where torch has done so itself, it says that there is no such capture.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        fresh: Any = torch.Generator(generator.device)
        fresh.seed()
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


class Graphed:
    """A forward pass that runs as a graph if one has room, and otherwise without a graph."""

    def __init__(self, forward: Forward, graphs: Mapping[Shape, Graph]) -> None:
        """Puts graphs in front of a forward pass, which runs for all other shapes."""
        self._forward = forward
        self._graphs = graphs
        self.name = f"{forward.name}, small passes by CUDA graphs"
        self.pads = forward.pads

    def values(self, batch: Sequence[Prepared], reading: Reading) -> Tensor:
        """Runs the model on a batch; returns what is read of its output."""
        longest = max(prepared.shape[1] for prepared in batch)
        shape = rounded(len(batch), longest, self._graphs)
        if shape is None:
            return self._forward.values(batch, reading)
        return self._graphs[shape].run(batch)


@dataclass
class Capture:
    """Captures the forward passes of one model.

    Attributes:
        padded: The padded forward pass, with the attention that the model was loaded with.
        values: What is read of the model's output for a batch, whatever its kind makes of it.
        texts: Makes the texts for the check.
        tolerance: Maximum difference of the values, relative to their size.
        make: Makes a `Graph`.
        wait: Returns when the device has computed everything.
        clock: Seconds, on any scale.
        graphs: What was captured, by shape.
        why: Why there are no more of them; empty where all shapes are captured.
    """

    padded: Padded
    values: Values
    texts: RandomTexts
    tolerance: float
    _: KW_ONLY
    make: Callable[..., Any] = Graph
    wait: Callable[[], None] = torch.cuda.synchronize
    clock: Callable[[], float] = time.perf_counter
    graphs: dict[Shape, Graph] = field(default_factory=dict)
    why: str = ""
    #: Time of the smallest pass without a graph.
    _usual_s: float = 0.0
    #: Size of the values of texts, by several of them.
    _scale: float = 0.0

    def __post_init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle() if self.make is Graph else None

    def run(self, shapes: Sequence[Shape]) -> None:
        """Captures shapes, smallest first, up to the first that fails or saves no time."""
        end_s = self.clock() + CAPTURE_S
        for shape in shapes:
            spelled = f"{shape.texts} x {shape.length} tokens"
            if self.clock() > end_s:
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
        # Shorter than the shape, so that warming up meets the mask that is captured.
        batch = self.texts([max(1, shape.length - 1)] * shape.texts)
        self._usual_s = self._usual_s or self._fastest_s(lambda: self.values(self.padded, batch))
        self._scale = self._scale or self._size_of_values(shape.length)
        graph = self.make(Fixed(self.padded, shape), self.values, batch, self._pool)
        differences = [self._difference(graph, texts) for texts in self._others(shape)]
        # Written so that NaN fails.
        if not all(each <= self.tolerance for each in differences):
            # The same error may have gone unnoticed in the other graphs.
            self.graphs = {}
            return f"differ by {max(differences):.1g} of their size"
        took_s = self._fastest_s(lambda: graph.run(batch))
        if took_s > MAX_TIME_SHARE * self._usual_s:
            return f"take {took_s * 1e3:.2f} ms, {self._usual_s * 1e3:.2f} do without a graph"
        self.graphs[shape] = graph
        return ""

    def _others(self, shape: Shape) -> Iterator[list[Prepared]]:
        """Texts other than the captured ones: shorter ones, and fewer."""
        for seed, texts in enumerate((shape.texts, shape.texts // 2 + 1), start=1):
            lengths = [max(1, shape.length - 3 * place - seed) for place in range(texts)]
            yield self.texts(lengths, seed)[: shape.texts]

    def _difference(self, graph: Graph, batch: list[Prepared]) -> float:
        usual = self.values(self.padded, batch)
        return worst_difference([*graph.run(batch)], [*usual], self._scale)

    def _size_of_values(self, length: int) -> float:
        texts = self.texts([length] * SCALE_TEXTS)
        return max(map(size, self.values(self.padded, texts)))

    def _fastest_s(self, run: Callable[[], Any]) -> float:
        times_s = []
        for _ in range(REPEATS):
            self.wait()
            started_s = self.clock()
            run()
            self.wait()
            times_s.append(self.clock() - started_s)
        return min(times_s)


def captured(
    name: str, device: torch.device, capture: Capture, shapes: Sequence[Shape]
) -> Mapping[Shape, Graph]:
    """The graphs of a model on a CUDA device; a line in the log says which, and why no more."""
    before_bytes = torch.cuda.memory_reserved(device)
    with torch.cuda.device(device), torch.inference_mode():
        capture.run(shapes)
    graphs = capture.graphs
    logger.info(
        "model %s: %d CUDA graphs, of up to %d tokens, %.0f MiB%s",
        *(name, len(graphs), max((shape.tokens for shape in graphs), default=0)),
        (torch.cuda.memory_reserved(device) - before_bytes) / 2**20,
        f"; no more, as {capture.why}" if capture.why else "",
    )
    return graphs
