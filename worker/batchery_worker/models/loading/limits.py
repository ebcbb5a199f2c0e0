"""How long a text may be, by what a model and its tokenizer say of themselves."""

from typing import Any

from torch import nn

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.loading.source import ModelSource

#: Tokenizers without a limit say 1e30, in tokens; no model has one near this.
NO_LIMIT_TOKENS = 10**9


def longest_text(
    settings: ModelSettings, source: ModelSource, tokenizer: Any, model: Any
) -> int | None:
    """The longest text in tokens, special ones included; None where nothing limits it.

    The setting decides. Where it is unset, the least of what the model's positions, its tokenizer
    and sentence-transformers' `sentence_bert_config.json` say.

    Raises:
        ModelLoadError: The setting is more than the model has positions for, or leaves no room for
            a token beside the special ones.
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
                f" beside {special} special tokens"
            )
        return settings.max_length
    sentence = source.json("sentence_bert_config.json") or {}
    stated = [positions, sentence.get("max_seq_length"), tokenizer.model_max_length]
    return min((int(each) for each in stated if each and each < NO_LIMIT_TOKENS), default=None)


def _positions(model: Any) -> int | None:
    """How many tokens the model has positions for."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # XLNet and its like say -1: their positions are relative.
    if not isinstance(most, int) or most <= 0:
        return None
    padding = padding_position(model)
    return most if padding is None else most - padding - 1


def padding_position(model: nn.Module) -> int | None:
    """The position that stands for padding, behind which the texts of RoBERTa's family begin.

    Returns:
        None where the first position is 0, as in most models.
    """
    for name, module in model.named_modules():
        is_table = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if is_table and module.padding_idx is not None:
            return int(module.padding_idx)
    return None
