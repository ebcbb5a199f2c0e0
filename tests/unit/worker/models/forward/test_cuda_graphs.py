"""Small passes of rounded shapes: right, and captured only as far as that pays.

There is no CUDA here; what stands in for a graph computes anew what a graph would play again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from batchery_worker.models.forward import RandomTexts
from batchery_worker.models.forward import cuda_graphs as capture_module
from batchery_worker.models.forward.cuda_graphs import (
    MAX_TIME_SHARE,
    REPEATS,
    Capture,
    Fixed,
    Graphed,
    Shape,
    shapes,
)
from support.tiny_models import ARCHITECTURES, Build, Load, run

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 2e-6


class Again:
    """Computes what lies in the place of a graph's inputs."""

    def __init__(self, forward: Any, values: Any, batch: Sequence[Any], pool: Any) -> None:
        self._forward, self._values = forward, values
        self.runs = 0

    def run(self, batch: Sequence[Any]) -> torch.Tensor:
        self.runs += 1
        self._forward.fill(batch)
        with torch.inference_mode():
            # Whatever is handed to it, only the inputs in their place count.
            values: torch.Tensor = self._values(self._forward, [])
        return values[: len(batch)].clone()


class Clock:
    """Goes on by what each pass takes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def small_ones(model: Any, make: Callable[..., Any] = Again) -> Any:
    """Gives a model that pads graphs of two shapes."""
    graphs = {
        shape: make(Fixed(model._pass, shape), model._values, [], None)
        for shape in (Shape(2, 16), Shape(4, 40))
    }
    model._pass = Graphed(model._pass, graphs)
    return graphs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounded_passes_give_what_others_give(
    architecture: str, build: Build, embedder: Load, texts: list[str]
) -> None:
    model = embedder(build(architecture), forward="padded")
    chosen = [texts[:1], [texts[0], texts[2]], [texts[3], *texts[2:4]], texts]
    usual = [torch.tensor([each["vector"] for each in run(model, some)]) for some in chosen]
    graphs = small_ones(model)
    for some, expected in zip(chosen, usual, strict=True):
        found = torch.tensor([each["vector"] for each in run(model, some)])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    # The last one is too large for both.
    assert [graph.runs for graph in graphs.values()] == [2, 1]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def captures(build: Build, embedder: Load, clock: Clock) -> Callable[..., Capture]:
    """Makes a `Capture`: passes take 5 ms without a graph, and what `graph_ms` says with one."""
    model = embedder(build("bert"), forward="padded")

    def make(graph_ms: Callable[[Shape], float], wrong: Shape | None = None) -> Capture:
        class Timed(Again):
            def run(self, batch: Sequence[Any]) -> torch.Tensor:
                shape = self._forward._shape
                values = super().run(batch)
                # What it says of the time of its passes, whatever else took some.
                clock.now_s += (graph_ms(shape) - 5) / 1e3
                return values * (float("nan") if shape == wrong else 1)

        def values(forward: Any, batch: Sequence[Any]) -> torch.Tensor:
            clock.now_s += 5e-3
            with torch.inference_mode():
                result: torch.Tensor = model._values(forward, batch)
            return result

        texts = RandomTexts(len(model._tokenize.names), np.arange(4, 20))
        return Capture(model._pass, values, texts, 1e-4, make=Timed, wait=lambda: None, clock=clock)

    return make


def test_shapes_are_captured_up_to_the_first_that_does_not_pay(
    captures: Callable[..., Capture],
) -> None:
    # Beyond 64 tokens computing takes longer than launching.
    capture = captures(lambda shape: 1.0 if shape.tokens <= 64 else 4.9)
    capture.run(shapes(32))
    assert sorted(shape.tokens for shape in capture.graphs) == [16, 32, 32, 64, 64]
    assert "take 4.90 ms, 5.00 do without a graph" in capture.why
    assert MAX_TIME_SHARE * 5 < 4.9


def test_all_shapes_are_captured_where_all_pay(captures: Callable[..., Capture]) -> None:
    capture = captures(lambda _: 1.0)
    wanted = shapes(16)
    capture.run(wanted)
    assert list(capture.graphs) == wanted
    assert capture.why == ""


def test_wrong_graph_discards_all_graphs(
    captures: Callable[..., Capture],
) -> None:
    capture = captures(lambda _: 1.0, wrong=Shape(4, 16))
    capture.run(shapes(16))
    assert capture.graphs == {}
    assert capture.why == "4 x 16 tokens differ by nan of their size"


def test_a_start_does_not_wait_for_many_captures(
    captures: Callable[..., Capture], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = captures(lambda _: 1.0)
    # Two shapes take longer than this.
    monkeypatch.setattr(capture_module, "CAPTURE_S", (5 * REPEATS + 8) / 1e3)
    capture.run(shapes(16))
    assert 0 < len(capture.graphs) < len(shapes(16))
    assert "s were over before" in capture.why
