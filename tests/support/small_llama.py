"""A small Llama with random weights, whose tokens are pieces of words, and which can chat."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from support.tiny_models import CORPUS

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
    "<assistant>"
)


def save_llama(folder: Path) -> Path:
    """Writes model and tokenizer; vLLM can run it, too."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokens.train_from_iterator(CORPUS, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        # vLLM's attention needs heads of at least 32 numbers.
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
