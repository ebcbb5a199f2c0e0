"""Which masks a model takes, found by trying: the host must not wait for the device in a pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from batchery_worker.models.forward import Forward
from batchery_worker.models.forward.padded import MaskForms, Padded
from batchery_worker.models.forward.probe_texts import RandomTexts, worst_difference
from batchery_worker.models.loading.tokenizer import Prepared

#: Lengths of the texts of the check, in tokens, where the longest is at most so long.
LENGTHS = (48, 5, 1, 31)

#: What the config of a model with sliding windows calls them. A window would be lost with a mask
#: that is ready, and only a text that is longer than the window would show it.
WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size")


def mask_forms(
    model: Any,
    padded: Padded,
    values: Callable[[Forward, Sequence[Prepared]], Sequence[Tensor]],
    texts: RandomTexts,
    max_length: int | None,
    tolerance: float,
) -> MaskForms:
    """Finds out which masks give the same results as the model's own.

    Args:
        model: Loaded.
        padded: Its padded forward pass, with no such mask yet.
        values: What the model's kind makes of each text of a batch.
        texts: Makes the texts of the check.
        max_length: Maximum length of a text in tokens; None if unlimited.
        tolerance: Maximum difference of the results, relative to their size.
    """
    config = model.config
    lengths = [min(length, max_length or length) for length in LENGTHS]
    uneven, even = texts(lengths), texts([lengths[0]] * 2)

    def is_same(masks: MaskForms, batch: Sequence[Prepared]) -> bool:
        changed = padded.with_masks(masks)
        try:
            for results in (Padded.tokens, values):
                difference = worst_difference(results(changed, batch), results(padded, batch))
                if not difference <= tolerance:
                    return False
        except Exception:  # noqa: BLE001 (the code of any model)
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
