"""Masks with which the host need not wait for the device: found right, and right."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from batchery_worker.models.forward import RandomTexts
from batchery_worker.models.forward.padded import MaskForms, Padded
from batchery_worker.models.forward.selection import Candidate, find_masks
from support.tiny_models import ARCHITECTURES, Build, Load, run

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 2e-6

#: Masks that are ready suit only encoders: what is causal or has a window is lost with them.
READY = ("bert", "bert-left", "roberta", "roberta-left", "distilbert", "t5", "bart")

TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])

LABELS = ("animal", "weather", "trade")


def forms(model: Any) -> MaskForms:
    texts = RandomTexts(len(model._tokenize.names), np.arange(4, 20))
    return find_masks(
        Candidate(
            *("padded", model.model, model.max_length, model._pass),
            *(model._values_by_text, texts),
        )
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_gets_the_masks_that_it_takes(
    architecture: str, build: Build, embedder: Load, texts: list[str]
) -> None:
    model = embedder(build(architecture), forward="padded")
    usual = [run(model, some) for some in (texts, texts[:1], texts[2:3] * 3)]
    masks = model._pass.masks = forms(model)
    assert masks.none
    # T5 of transformers before 5.16 takes none that is ready.
    if architecture != "t5" or TRANSFORMERS >= (5, 16):
        assert masks.ready == (architecture in READY)
    for some, expected in zip((texts, texts[:1], texts[2:3] * 3), usual, strict=True):
        for one, other in zip(run(model, some), expected, strict=True):
            difference = torch.tensor(one["vector"]) - torch.tensor(other["vector"])
            assert difference.abs().max() < TOLERANCE


def test_a_model_that_is_wrong_without_a_mask_keeps_its_own(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedder(build("bert"), forward="padded")
    right = Padded._named

    def wrong(self: Padded, grid: torch.Tensor, *, is_full: bool) -> dict[str, Any]:
        inputs = right(self, grid, is_full=is_full)
        mask = inputs["attention_mask"]
        if mask is None:
            inputs["input_ids"] = torch.zeros_like(grid[0])
        elif mask.ndim == 4:
            inputs["attention_mask"] = torch.ones_like(mask)
        return inputs

    monkeypatch.setattr(Padded, "_named", wrong)
    assert forms(model) == MaskForms()
