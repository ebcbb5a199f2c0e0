"""How many tokens a text may have."""

import logging
from typing import Any

from torch import nn

from batchery.settings import ModelSettings

logger = logging.getLogger(__name__)

#: Limits from here on, in tokens, mean no limit: such tokenizers say 1e30.
NO_LIMIT_TOKENS = 10**9


def longest_text(
    settings: ModelSettings, tokenizer: Any, model: Any, *, files_decide: bool = False
) -> int | None:
    """The maximum length of a text in tokens, special tokens included; None if unlimited.

    The setting decides. If it is unset, the minimum of the model's positions and of the limit of
    its tokenizer holds.

    Args:
        settings: Of the model.
        tokenizer: Of transformers.
        model: Of transformers.
        files_decide: A model whose positions are computed may have a limit above those that its
            config names.

    Raises:
        ValueError: The setting exceeds the model's positions, or leaves room for special tokens
            only.
    """
    positions = _positions(model)
    if files_decide and any("Rotary" in type(each).__name__ for each in model.modules()):
        if positions is not None and (settings.max_length or 0) > positions:
            logger.warning(
                "model %s: max_length = %d is more than the %d tokens that its config names;"
                " the results of longer texts may be worse",
                *(settings.model, settings.max_length, positions),
            )
        positions = None
    if settings.max_length is not None:
        special = tokenizer.num_special_tokens_to_add()
        if positions is not None and settings.max_length > positions:
            raise ValueError(
                f"max_length = {settings.max_length}, but the model takes at most {positions}"
                " tokens"
            )
        if settings.max_length <= special:
            raise ValueError(
                f"max_length = {settings.max_length} leaves no room for text besides {special}"
                " special tokens"
            )
        return settings.max_length
    own = tokenizer.model_max_length
    limits = [int(each) for each in (positions, own) if each and each < NO_LIMIT_TOKENS]
    return min(limits, default=None)


def _positions(model: Any) -> int | None:
    """The number of positions of the model."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # XLNet and its like say -1: their positions are relative.
    if not isinstance(positions, int) or positions <= 0:
        return None
    padding = padding_position(model)
    return positions if padding is None else positions - padding - 1


def padding_position(model: nn.Module) -> int | None:
    """The position of padding; the texts of RoBERTa's family start behind it.

    Returns:
        None if texts start at position 0, as in most models.
    """
    for name, module in model.named_modules():
        is_table = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if is_table and module.padding_idx is not None:
            return int(module.padding_idx)
    return None
