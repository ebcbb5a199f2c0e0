"""Whether batches give what single texts give.

The reference is the model in fp32 on the same device, one text at a time: without padding, packing,
half precision or quantized weights.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from kombu.utils.imports import symbol_by_name
from torch import Tensor
from torch.nn.functional import cosine_similarity

from batchery.errors import ModelLoadError
from batchery.installer import KINDS
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.batching.planner import plan
from batchery_worker.models.hardware.devices import use_device
from batchery_worker.models.text_model import Outputs, TextModel

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

#: For weights of eight bits, in any number format: int8 keeps 8 bits of a number, float8 only 4.
#: MiniLM has 1e-2 and 0.997, and 2e-2 and 0.996.
QUANTIZED_TOLERANCE = {"int8": Tolerance(5e-2, 0.99), "float8": Tolerance(1e-1, 0.98)}


@dataclass(frozen=True)
class Comparison:
    """One forward pass against the reference.

    Attributes:
        forward: `padded` or `packed`.
        difference: Maximum difference of any number; None if the model has no such pass.
        cosine: Minimum cosine of two results of one text; None as above.
        passed: Both are within the tolerance, or the model has no such pass.
        why: Why the model has no such pass.
    """

    forward: str
    difference: float | None = None
    cosine: float | None = None
    passed: bool = True
    why: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """What `verify` found.

    Attributes:
        dtype: Number format of the weights, as torch spells it.
        quantize: `int8` or `float8` for weights of eight bits, else `none`.
        texts: Number of texts.
        tolerance: The allowed differences.
        comparisons: One per forward pass.
    """

    device: str
    dtype: str
    quantize: str
    texts: int
    tolerance: Tolerance
    comparisons: Sequence[Comparison]

    @property
    def passed(self) -> bool:
        """Whether all forward passes passed."""
        return all(each.passed for each in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "tolerance": self.tolerance._asdict(), "passed": self.passed}


def verify(settings: ModelSettings, device: str, texts: Sequence[str] = ()) -> VerificationReport:
    """Compares a model's batches with single texts in fp32.

    Loads the model three times, one after the other.

    Args:
        settings: The model.
        device: As torch spells it.
        texts: Texts to compare; built-in texts of many lengths if empty.

    Raises:
        ModelLoadError: The model cannot be loaded with these settings, or takes none of the texts.
    """
    use_device(device)
    texts = texts or sample_texts()
    plain = {"engine": "transformers", "dtype": "fp32", "quantize": "none", "cuda_graphs": "never"}
    single = _load(settings, device, forward="padded", **plain)
    items = single.preprocess(
        [single.sample_item(text) for text in texts], **single.sample_keywords
    )
    prepared = [each for each in items if not isinstance(each, Failed)]
    if not prepared:
        raise ModelLoadError(f"model {settings.model!r}: takes none of the texts")
    reference = _joined([_values(single, [each])[0] for each in prepared])
    # Two large models would not fit into memory together.
    del single
    comparisons = []
    for forward in ("padded", "packed"):
        wanted = "auto" if forward == "packed" != settings.forward else forward
        model = _load(settings, device, forward=wanted)
        dtype = model.model.dtype
        tolerance = QUANTIZED_TOLERANCE.get(settings.quantize, TOLERANCE[dtype])
        if forward == "packed" and model.pads:
            comparisons.append(Comparison(forward, why=model.why_padded))
        else:
            values = _batched(model, prepared)
            comparisons.append(_compare(forward, values, reference, tolerance))
        del model
    name = str(dtype).removeprefix("torch.")
    return VerificationReport(
        device, name, settings.quantize, len(prepared), tolerance, comparisons
    )


def sample_texts() -> list[str]:
    """Texts of many lengths, always the same."""
    chosen = random.Random(1)
    return [" ".join(chosen.choices(VOCABULARY, k=count)) for count in WORDS]


def _load(settings: ModelSettings, device: str, **changes: str) -> TextModel:
    changed = settings.model_copy(update=changes)
    kind: type[TextModel] = symbol_by_name(KINDS[changed.kind])
    model = kind(changed)
    model.load(device)
    return model


def _values(model: TextModel, batch: Sequence[Any]) -> Sequence[Tensor]:
    """What the model makes of each text, (C,), or (L, C) for a row per token."""
    outputs: Outputs = model.forward(batch, **model.sample_keywords)
    return model.by_text(outputs.pending.wait(), [head["tokens"] for head in outputs.heads])


def _joined(texts: Sequence[Tensor]) -> Tensor:
    """The values of all texts, one row per text or per token, (R, C)."""
    return torch.cat([each.view(-1, each.shape[-1]) for each in texts])


def _batched(model: TextModel, prepared: Sequence[Any]) -> Tensor:
    """Values of all texts, in order, computed in micro-batches as in a worker."""
    cut = plan(
        [model.tokens(each) for each in prepared],
        MAX_BATCH_TOKENS,
        len(prepared),
        pads=model.pads,
    )
    texts: dict[int, Tensor] = {}
    for part in cut:
        texts |= zip(part, _values(model, [prepared[place] for place in part]), strict=True)
    return _joined([texts[place] for place in range(len(prepared))])


def _compare(forward: str, values: Tensor, reference: Tensor, tolerance: Tolerance) -> Comparison:
    scale = reference.abs().max().clamp_min(1.0)
    difference = float((values - reference).abs().max() / scale)
    cosine = float(cosine_similarity(values.double(), reference.double(), dim=1).min())
    # Written so that NaN fails.
    passed = difference <= tolerance.difference and cosine >= tolerance.cosine
    return Comparison(forward, difference, cosine, passed)
