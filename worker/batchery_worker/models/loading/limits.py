"""How long a text may be, by the model, its tokenizer and its files."""

from typing import Any

from torch import nn

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.loading.source import ModelSource

#: Limits from here on, in tokens, mean no limit: such tokenizers say 1e30.
NO_LIMIT_TOKENS = 10**9


def longest_text(
    settings: ModelSettings, source: ModelSource, tokenizer: Any, model: Any
) -> int | None:
    """The maximum length of a text in tokens, special tokens included; None if unlimited.

    The setting decides. If it is unset, the minimum of the model's positions, its tokenizer's limit
    and sentence-transformers' `sentence_bert_config.json` holds.

    Raises:
        ModelLoadError: The setting exceeds the model's positions, or leaves room for special tokens
            only.
    """
    positions = _positions(model)
    if settings.max_length is not None:
        special = tokenizer.num_special_tokens_to_add()
        if positions is not None and settings.max_length > positions:
            raise ModelLoadError(
                f"model {source.name!r}: max_length = {settings.max_length}, but the model takes"
                f" at most {positions} tokens"
            )
        if settings.max_length <= special:
            raise ModelLoadError(
                f"model {source.name!r}: max_length = {settings.max_length} leaves no room for text"
                f" besides {special} special tokens"
            )
        return settings.max_length
    sentence = source.json("sentence_bert_config.json") or {}
    stated = [positions, sentence.get("max_seq_length"), tokenizer.model_max_length]
    return min((int(each) for each in stated if each and each < NO_LIMIT_TOKENS), default=None)


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
