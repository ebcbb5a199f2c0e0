"""Times of words in a batch of Whisper, each as of its recording alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def time_rows_alone(model: Any) -> None:
    """Has a Whisper of transformers find the times of tokens row by row.

    They come from the attention between tokens and sound, which transformers scales over all tokens
    of a batch. A row that ended before others would have that of its padding in it.
    """
    extract = model._extract_token_timestamps

    def extract_each(outputs: Any, *given: Any, num_frames: Any = None, **options: Any) -> Tensor:
        rows = range(len(outputs.sequences))
        begin = options.get("num_input_ids") or 0
        ends = model.generation_config.eos_token_id
        times = [
            extract(
                _row(outputs, row, begin, ends),
                *given,
                num_frames=num_frames if num_frames is None else num_frames[row : row + 1],
                **options,
            )[0]
            for row in rows
        ]
        return torch.nn.utils.rnn.pad_sequence(times, batch_first=True)

    wrapped: Callable[..., Tensor] = extract_each
    model._extract_token_timestamps = wrapped


def _row(outputs: Any, row: int, begin: int, ends: Any) -> Any:
    """What `generate` gives for one row alone.

    Args:
        outputs: Of all rows.
        row: Number of the row.
        begin: Number of tokens that were given.
        ends: The token or tokens that end a text.
    """
    beams = len(outputs.cross_attentions[0][0]) // len(outputs.sequences)
    steps, parts = len(outputs.cross_attentions), {"sequences": outputs.sequences[row : row + 1]}
    if "beam_indices" in outputs:
        indices = outputs.beam_indices[row : row + 1]
        parts["beam_indices"] = torch.where(indices < 0, indices, indices - row * beams)
    else:
        written = outputs.sequences[row, begin:]
        places = torch.isin(written, torch.tensor(ends, device=written.device)).nonzero()
        steps = int(places[0]) + 1 if len(places) else len(written)
    attentions = tuple(
        tuple(layer[row * beams : (row + 1) * beams] for layer in step)
        for step in outputs.cross_attentions[:steps]
    )
    return type(outputs)(**parts, cross_attentions=attentions)
