"""A model with a CUDA stream of its own launches all that it launches there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from batchery_worker.models import text_model
from batchery_worker.models.hardware.transfers import move_to_host
from batchery_worker.models.text_model import TextModel
from support.tiny_models import Build, Load


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams that are current, innermost last; each model opens one of its own."""
    current: list[object] = [None]

    @contextmanager
    def within(stream: object) -> Iterator[None]:
        current.append(current[-1] if stream is None else stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(text_model, "open_stream", lambda _: object())
    return current


@pytest.mark.parametrize("how", ["shared", "own"])
def test_all_that_a_model_launches_is_on_its_stream(
    how: str,
    build: Build,
    embedder: Load,
    streams: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, object]] = []
    load = TextModel._load

    def note(what: str, run: Any) -> Any:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            seen.append((what, streams[-1]))
            return run(*arguments, **keywords)

        return noted

    monkeypatch.setattr(TextModel, "_load", note("load", load))
    monkeypatch.setattr(text_model, "move_to_host", note("move to host", move_to_host))
    models = [embedder(build("bert"), cpu_streams=1, cuda_stream=how) for _ in range(2)]
    for model in models:
        monkeypatch.setattr(model._pass, "values", note("pass", model._pass.values))
        model.postprocess(model.forward(model.preprocess(["a text"])))
        model.put_aside()
        monkeypatch.setattr(model.model, "to", note("take back", model.model.to))
        model.take_back()
    assert {what for what, _ in seen} == {"load", "pass", "move to host", "take back"}
    by_stream = {stream for _, stream in seen}
    assert len(by_stream) == (2 if how == "own" else 1)
    assert (None in by_stream) == (how == "shared")
    assert streams == [None]
