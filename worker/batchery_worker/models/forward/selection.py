"""Which forward pass a model gets: packed where that is proven right and faster, else padded."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchery_worker.models.forward import Forward, RandomTexts, worst_difference
from batchery_worker.models.forward.attention import HALF, NotPackable, varlen_kernel
from batchery_worker.models.forward.packed import Packed
from batchery_worker.models.forward.padded import MaskForms, Padded
from batchery_worker.models.source import reason
from batchery_worker.models.tokenizer import Prepared

#: Lengths of the texts of the check, in tokens: neighbours of one length, a single token, and texts
#: longer than the usual local attention, whose errors short texts would not show. Together they are
#: longer than most models have positions for, which happens to rows.
CHECK_LENGTHS = (150, 37, 150, 1, 9, 9, 3, 150, 20)

#: Lengths of the texts for which masks are compared, where the longest is at most so long.
MASKED_LENGTHS = (48, 5, 1, 31)

#: What the config of a model with sliding windows calls them. A window would be lost with a mask
#: that is ready, and only a text that is longer than the window would show it.
WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size")

#: Maximum length, in tokens, of the check's texts whose vectors or scores are compared as well.
SHORT_TOKENS = 40

#: Maximum sliding window that is checked without being asked for, in tokens: a longer text takes a
#: large model on a CPU minutes.
MAX_CHECKED_WINDOW = 1024

#: Noise of a device that is never taken for more, relative to the size of results.
LEAST_NOISE = 2.5e-7

#: Maximum difference of a text's token vectors, relative to their size. In bf16, rounding makes
#: 0.012 in MiniLM and 0.037 in a model of 32 layers. Wrong positions, or an attention that sees too
#: little, make 0.5. What leaks from neighbours is found without any tolerance.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.5e-2, torch.bfloat16: 0.1}


class Candidate(NamedTuple):
    """A model that needs a forward pass.

    Attributes:
        setting: `auto`, `padded` or `packed`.
        model: Loaded.
        max_length: Maximum length of a text in tokens; None if unlimited.
        padded: Its padded forward pass.
        values: What its kind makes of each text of a batch, in order.
        texts: Makes the texts of the check.
    """

    setting: str
    model: Any
    max_length: int | None
    padded: Padded
    values: Callable[[Forward, Sequence[Prepared]], Sequence[Tensor]]
    texts: RandomTexts

    @property
    def tolerance(self) -> float:
        """Maximum difference of its results, relative to their size."""
        return TOLERANCE[self.model.dtype]


def find_masks(candidate: Candidate) -> MaskForms:
    """Finds out which masks give the same results as the model's own, which it has now."""
    config, padded, most = candidate.model.config, candidate.padded, candidate.max_length
    lengths = [min(length, most or length) for length in MASKED_LENGTHS]
    uneven, even = candidate.texts(lengths), candidate.texts([lengths[0]] * 2)

    def is_same(masks: MaskForms, batch: Sequence[Prepared]) -> bool:
        try:
            for compute in (Padded.tokens, candidate.values):
                usual = compute(padded, batch)
                padded.masks = masks
                found = compute(padded, batch)
                padded.masks = MaskForms()
                if not worst_difference(found, usual) <= candidate.tolerance:
                    return False
        except Exception:  # noqa: BLE001 (the code of any model)
            padded.masks = MaskForms()
            return False
        return True

    with torch.inference_mode():
        ready = config._attn_implementation == "sdpa" and not any(
            getattr(config, name, None) for name in WINDOWS
        )
        return MaskForms(
            none=is_same(MaskForms(none=True), even),
            ready=ready and is_same(MaskForms(ready=True), uneven),
        )


def choose(candidate: Candidate) -> tuple[Padded | Packed, str]:
    """Chooses between the padded and the packed forward pass.

    The packed pass is taken if the device has a fast attention for it, and if every token gets the
    vector that it gets when its text is alone.

    Returns:
        The pass, and why it is not the packed one.

    Raises:
        ValueError: The setting says packed, and the model cannot be packed.
    """
    padded = candidate.padded
    if candidate.setting == "padded":
        return padded, "as the settings say"
    problem = _obstacle(candidate)
    if problem is None:
        packed = Packed(candidate.model, padded.device, padded.names)
        problem = _check(candidate, packed)
        if problem is None:
            packed.is_proven = True
            return packed, ""
    if candidate.setting == "packed":
        raise ValueError(f"forward = 'packed', but {problem}; set it to auto or padded")
    return padded, f"since {problem}"


def _obstacle(candidate: Candidate) -> str | None:
    """What rules out packing before anything is tried."""
    if "position_ids" not in inspect.signature(candidate.model.forward).parameters:
        return "its code takes no position_ids"
    kind = candidate.padded.device.type
    if kind == "cuda":
        # Text by text, the host would wait for the device in each layer.
        if varlen_kernel() is None:
            return f"torch {torch.__version__} has no attention for rows of texts on CUDA"
        if candidate.model.dtype not in HALF:
            dtype = _dtype(candidate)
            return f"attention for rows of texts on CUDA is for fp16 and bf16, not {dtype}"
    elif candidate.setting != "packed" and kind != "cpu":
        return f"there is no fast attention for rows of texts on {kind}"
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
    if candidate.setting == "auto" and max(unseen) > MAX_CHECKED_WINDOW:
        return f"its attention window of {max(unseen)} tokens is too wide to be checked"
    candidate.model.set_attn_implementation(attention)
    return _compare(candidate, packed, (3, max(unseen) + 9, 5))


def _compare(candidate: Candidate, packed: Packed, lengths: Sequence[int]) -> str | None:
    """Compares texts in one row with each of them alone; leaves the packed attention installed."""
    longest = candidate.max_length or max(lengths)
    lengths = [min(length, longest) for length in lengths]
    texts = candidate.texts(lengths)
    short = _short(texts)
    padded, values = candidate.padded, candidate.values
    part = "it"
    try:
        with torch.inference_mode():
            alone = [padded.tokens([text])[0] for text in texts]
            alone_values = [values(padded, [text])[0] for text in short]
            packed.install()
            tokens = packed.tokens(texts)
            if packed.last.calls == 0:
                return "its attention cannot be replaced in transformers"
            part = "its head"
            packed_values = values(packed, short)
            if [each.shape for each in packed_values] != [each.shape for each in alone_values]:
                return "its head does not read the first token of each text"
            problem = _leak(candidate, packed, [text.shape[1] for text in texts])
    except NotPackable as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (the code of any model)
        return f"{part} fails when packed: {type(error).__name__}: {reason(error)}"
    worst = {
        "token vectors": worst_difference(tokens, alone),
        "results": worst_difference(packed_values, alone_values),
    }
    packed.worst = max(packed.worst, *worst.values())
    for what, difference in worst.items():
        # Written so that NaN fails.
        if not difference <= candidate.tolerance:
            return f"packed {what} differ by {difference:.1g} of their size, {_dtype(candidate)}"
    return problem


def _leak(candidate: Candidate, packed: Packed, lengths: Sequence[int]) -> str | None:
    """Whether a text depends on its neighbours: every other text is replaced, and the rest stays.

    Rounding is no excuse for a difference: the shapes are the same, and so are the sums. Only a
    device whose results vary from run to run gets some tolerance. Short texts show it, too.
    """
    lengths = [min(length, SHORT_TOKENS) for length in lengths]
    texts, others = candidate.texts(lengths), candidate.texts(lengths, 1)
    before = _results(candidate, packed, texts)
    for kept in (0, 1):
        batch = [(texts if place % 2 == kept else others)[place] for place in range(len(texts))]
        found = _results(candidate, packed, batch)
        pairs = [
            (found[place][number], result)
            for place in range(kept, len(texts), 2)
            for number, result in enumerate(before[place])
        ]
        if all(torch.equal(*pair) for pair in pairs):
            continue
        difference = worst_difference([one for one, _ in pairs], [other for _, other in pairs])
        again = _results(candidate, packed, texts)
        # Where parts of a sum come in any order, a repetition may be equal by chance.
        noise = max(LEAST_NOISE, *map(worst_difference, again, before))
        if not difference <= 2 * noise:
            return f"packed results differ by {difference:.1g} of their size with other neighbours"
    return None


def _results(candidate: Candidate, packed: Packed, batch: Sequence[Prepared]) -> list[list[Tensor]]:
    """For each text of a row, its token vectors, and its values if it is short."""
    values = iter(candidate.values(packed, _short(batch)))
    return [
        [vectors, next(values)] if text.shape[1] <= SHORT_TOKENS else [vectors]
        for text, vectors in zip(batch, packed.tokens(batch), strict=True)
    ]


def _short(texts: Sequence[Prepared]) -> list[Prepared]:
    return [text for text in texts if text.shape[1] <= SHORT_TOKENS]


def _dtype(candidate: Candidate) -> str:
    return str(candidate.model.dtype).removeprefix("torch.")
