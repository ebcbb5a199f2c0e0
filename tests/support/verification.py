"""Whether batches give what single texts give.

The reference is the model in fp32 on the same device, one text at a time: without padding, packing
or half precision.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kombu.utils.imports import symbol_by_name
from torch import Tensor
from torch.nn.functional import cosine_similarity

from batchery.installer import KINDS
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.batching.planner import plan
from batchery_worker.models.hardware.devices import use_device

#: Number of words of each text: very different lengths, and some alike; the longest exceed most
#: limits.
WORDS = (1, 1, 2, 3, 3, 5, 8, 8, 13, 21, 21, 34, 55, 55, 89, 144, 233, 377, 610)

#: Words of the texts: common words, names, numbers and other scripts.
VOCABULARY = (
    *("the", "a", "of", "and", "to", "in", "is", "was", "for", "on", "with", "as", "under"),
    *("river", "stone", "garden", "window", "paper", "engine", "silver", "quickly", "never"),
    *("seven", "1984", "3.14", "don't", "e-mail", "(yes)", "question?", "answer!"),
    *("Paris", "Zürich", "naïve", "résumé", "данные", "数字"),
)

#: Maximum tokens of a micro-batch: a few texts share one, and the texts need several.
MAX_BATCH_TOKENS = 1024


class Tolerance(NamedTuple):
    """What still counts as the same.

    Attributes:
        difference: Maximum difference of any number, as a share of the largest number or of 1.
        cosine: Minimum cosine of two results of one text.
    """

    difference: float
    cosine: float


#: By number format of the weights: fp16 keeps 11 bits of a number and bf16 keeps 8, and each layer
#: rounds again.
TOLERANCE = {
    torch.float32: Tolerance(2e-5, 0.99999),
    torch.float16: Tolerance(1e-2, 0.9995),
    torch.bfloat16: Tolerance(5e-2, 0.995),
}


class Comparison(NamedTuple):
    """One forward pass against the reference.

    Attributes:
        difference: Maximum difference of any number, as a share of the largest number or of 1.
        cosine: Minimum cosine of two results of one text.
        tolerance: What is allowed.
    """

    difference: float
    cosine: float
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        """Whether both are within the tolerance; NaN is not."""
        return self.difference <= self.tolerance[0] and self.cosine >= self.tolerance[1]


def verify(
    settings: ModelSettings, device: str, texts: Sequence[str] = ()
) -> dict[str, Comparison]:
    """Compares a model's batches with single texts in fp32.

    Args:
        settings: The model.
        device: As torch spells it.
        texts: Texts to compare; built-in texts of many lengths if empty.

    Returns:
        By forward pass, `padded` and `packed`; without the latter if the model is not packed.
    """
    use_device(device)
    plain = {"engine": "transformers", "dtype": "fp32", "cuda_graphs": "never"}
    single = _load(settings, device, forward="padded", **plain)
    items = [single.sample_item(text) for text in texts or sample_texts()]
    prepared = single.preprocess(items, **single.sample_keywords)
    fit = [each for each in prepared if not isinstance(each, Failed)]
    reference = _join([_values(single, [each])[0] for each in fit])
    # Two large models would not fit into memory together.
    del single
    found = {}
    for forward in ("padded", "packed"):
        wanted = "auto" if forward == "packed" != settings.forward else forward
        model = _load(settings, device, forward=wanted)
        if forward == "padded" or not model.pads:
            tolerance = TOLERANCE[model.model.dtype]
            found[forward] = _compare(_compute(model, fit), reference, tolerance)
        del model
    return found


def sample_texts() -> list[str]:
    """Texts of many lengths, always the same."""
    chosen = random.Random(1)
    return [" ".join(chosen.choices(VOCABULARY, k=count)) for count in WORDS]


def _load(settings: ModelSettings, device: str, **changes: str) -> Any:
    changed = settings.model_copy(update=changes)
    model = symbol_by_name(KINDS[changed.kind])(changed)
    model.load(device)
    return model


def _values(model: Any, batch: Sequence[Any]) -> Sequence[Tensor]:
    """What the model makes of each text, (C,), or (L, C) for a row per token."""
    outputs = model.forward(batch, **model.sample_keywords)
    values: Sequence[Tensor] = model.by_text(
        outputs.pending.wait(), [head["tokens"] for head in outputs.heads]
    )
    return values


def _compute(model: Any, prepared: Sequence[Any]) -> Tensor:
    """Values of all texts, in order, computed in micro-batches as in a worker."""
    lengths = [model.tokens(each) for each in prepared]
    texts: dict[int, Tensor] = {}
    for part in plan(lengths, MAX_BATCH_TOKENS, len(prepared), pads=model.pads):
        texts |= zip(part, _values(model, [prepared[place] for place in part]), strict=True)
    return _join([texts[place] for place in range(len(prepared))])


def _join(texts: Sequence[Tensor]) -> Tensor:
    """The values of all texts, one row per text or per token, (R, C)."""
    return torch.cat([each.view(-1, each.shape[-1]) for each in texts])


def _compare(values: Tensor, reference: Tensor, tolerance: Tolerance) -> Comparison:
    scale = reference.abs().max().clamp_min(1.0)
    difference = float((values - reference).abs().max() / scale)
    cosine = float(cosine_similarity(values.double(), reference.double(), dim=1).min())
    return Comparison(difference, cosine, tolerance)
