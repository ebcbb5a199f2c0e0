"""Which forward pass a model gets: packed where that is proven right and faster, else padded."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchery.errors import ModelLoadError
from batchery_worker.models.forward.attention import HALF, NotPackable, varlen_kernel
from batchery_worker.models.forward.cuda_graphs import Values
from batchery_worker.models.forward.packed import Packed
from batchery_worker.models.forward.padded import Padded
from batchery_worker.models.forward.probe_texts import RandomTexts
from batchery_worker.models.loading.source import reason

#: Lengths of the texts of the check, in tokens: neighbours of one length, a single token, and texts
#: longer than the usual local attention, whose errors short texts would not show. Together they are
#: longer than most models have positions for, which happens to rows.
CHECK_LENGTHS = (150, 37, 150, 1, 9, 9, 3, 150, 20)

#: Maximum length, in tokens, of the check's texts whose vectors or scores are compared as well.
SHORT_TOKENS = 40

#: Maximum sliding window that is checked without being asked for, in tokens: a longer text takes a
#: large model on a CPU minutes.
MAX_CHECKED_WINDOW = 1024

#: Maximum difference of a text's token vectors, relative to their size. Rounding makes 1e-6, 1.5e-3
#: and 1e-2 in models of two layers and MiniLM, and more in deeper models. A single token that leaks
#: from a neighbour makes at least 5e-2, and all tokens make 0.5.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Choice(NamedTuple):
    """The forward pass of a model, and why it is not the packed one."""

    forward: Padded | Packed
    why: str


class Candidate(NamedTuple):
    """A model that needs a forward pass.

    Attributes:
        name: For errors.
        wanted: The setting: `auto`, `padded` or `packed`.
        model: Loaded.
        device: Where it is.
        padding_position: See `Packed`.
        max_length: Maximum length of a text in tokens; None if unlimited.
        padded: Its padded forward pass.
        values: What its kind makes of a batch.
        inputs: Names of the inputs that a tokenized text has, token ids first.
        texts: Makes the texts of the check.
    """

    name: str
    wanted: str
    model: Any
    device: torch.device
    padding_position: int | None
    max_length: int | None
    padded: Padded
    values: Values
    inputs: Sequence[str]
    texts: RandomTexts


def choose(candidate: Candidate) -> Choice:
    """Chooses between the padded and the packed forward pass.

    The packed pass is taken if the device has a fast attention for it, and if every token gets the
    vector that it gets when its text is alone.

    Raises:
        ModelLoadError: The setting says packed, and the model cannot be packed.
    """
    if candidate.wanted == "padded":
        return Choice(candidate.padded, "as the settings say")
    problem = _obstacle(candidate)
    if problem is None:
        varlen = candidate.device.type == "cuda" and _varlen_obstacle(candidate) is None
        packed = Packed(
            candidate.model,
            candidate.device,
            names=candidate.inputs,
            padding_position=candidate.padding_position,
            varlen=varlen,
        )
        problem = _check(candidate, packed)
        if problem is None:
            return Choice(packed, "")
    if candidate.wanted == "packed":
        raise ModelLoadError(
            f"model {candidate.name!r}: forward = 'packed', but {problem}; set it to auto or padded"
        )
    return Choice(candidate.padded, f"since {problem}")


def _obstacle(candidate: Candidate) -> str | None:
    """What rules out packing before anything is tried."""
    if "position_ids" not in inspect.signature(candidate.model.forward).parameters:
        return "its code takes no position_ids"
    if candidate.wanted == "packed" or candidate.device.type == "cpu":
        return None
    if candidate.device.type != "cuda":
        return f"there is no fast attention for rows of texts on {candidate.device.type}"
    return _varlen_obstacle(candidate)


def _varlen_obstacle(candidate: Candidate) -> str | None:
    if varlen_kernel() is None:
        return f"torch {torch.__version__} has no attention for rows of texts on CUDA"
    if candidate.model.dtype not in HALF:
        return f"attention for rows of texts on CUDA is for fp16 and bf16, not {_dtype(candidate)}"
    return None


def _check(candidate: Candidate, packed: Packed) -> str | None:
    """Installs the packed attention and compares; removes it if it is wrong."""
    model = candidate.model
    before = model.config._attn_implementation
    problem = _compare(candidate, packed, CHECK_LENGTHS)
    if problem is None:
        longest = min(candidate.max_length or max(CHECK_LENGTHS), max(CHECK_LENGTHS))
        problem = _check_window(candidate, packed, longest, before)
    if problem is not None:
        model.set_attn_implementation(before)
    return problem


def _check_window(candidate: Candidate, packed: Packed, longest: int, attention: str) -> str | None:
    """Compares again, with a text that is longer than the widest window that a text can reach."""
    limit = candidate.max_length or float("inf")
    unseen = [window for window in packed.last.windows if longest <= window < limit]
    if not unseen:
        return None
    if candidate.wanted == "auto" and max(unseen) > MAX_CHECKED_WINDOW:
        return f"its attention window of {max(unseen)} tokens is too wide to be checked"
    candidate.model.set_attn_implementation(attention)
    return _compare(candidate, packed, (3, max(unseen) + 9, 5))


def _compare(candidate: Candidate, packed: Packed, lengths: Sequence[int]) -> str | None:
    """Compares texts in one row with each of them alone; leaves the packed attention installed."""
    longest = candidate.max_length or max(lengths)
    texts = candidate.texts([min(length, longest) for length in lengths])
    short = [text for text in texts if text.shape[1] <= SHORT_TOKENS]
    padded, values = candidate.padded, candidate.values
    part = "it"
    try:
        with torch.inference_mode():
            alone = [padded.tokens([text])[0] for text in texts]
            alone_values = torch.cat([values(padded, [text]) for text in short])
            packed.install()
            tokens = packed.tokens(texts)
            if packed.last.calls == 0:
                return "its attention cannot be replaced in transformers"
            part = "its head"
            packed_values = values(packed, short)
    except NotPackable as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (the code of any model)
        return f"{part} fails when packed: {type(error).__name__}: {reason(error)}"
    if packed_values.shape != alone_values.shape:
        return "its head does not read the first token of each text"
    worst = {
        "token vectors": max(map(_difference, tokens, alone)),
        "results": max(map(_difference, packed_values, alone_values)),
    }
    for what, difference in worst.items():
        # Written so that NaN fails.
        if not difference <= TOLERANCE[candidate.model.dtype]:
            return f"packed {what} differ by {difference:.1g} of their size, {_dtype(candidate)}"
    return None


def _difference(one: Tensor, other: Tensor) -> float:
    """Size of the difference, relative to the size of `other`; NaN where either has one."""
    other = other.float()
    return float((one.float() - other).norm() / other.norm().clamp_min(1e-12))


def _dtype(candidate: Candidate) -> str:
    return str(candidate.model.dtype).removeprefix("torch.")
