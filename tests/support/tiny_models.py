"""Tiny models of many architectures, with random weights, and how tests run them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from batchery.outcomes import Failed

#: Saves a tiny model: `build("bert", labels=("no", "yes"))`.
Build = Callable[..., Path]

#: Loads a saved model: `embedder(folder, device="cpu", **settings)`.
Load = Callable[..., Any]

#: Copies a folder to one that a test may change.
Copy = Callable[[Path], Path]

CORPUS = [
    "the cat sat on the mat and looked at the dog",
    "a dog barked at nine cats in the old garden",
    "rain falls on green hills while the river runs to the sea",
    "ships carry tea and salt from one harbour to the next",
]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
RANGE = {"max_position_embeddings": 80, "initializer_range": 0.3}
BERT = {**SMALL, **RANGE, "pad_token_id": 1, "intermediate_size": 48}
DECODER = {**SMALL, **RANGE, "num_key_value_heads": 2, "intermediate_size": 48}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 1}
#: The window is narrow enough for the texts of the tests to reach beyond it.
MODERNBERT = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80, "initializer_range": 0.3}
XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.3}
DEBERTA = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BART = {f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in SIDES.items()}
BART |= {"d_model": 32, "max_position_embeddings": 80}
ENDS = {"bos_token_id": 0, "eos_token_id": 3}
BART_ENDS = {"decoder_start_token_id": 3, "forced_eos_token_id": 3}
CAUSAL_LEFT = {"causal": True, "padding_side": "left"}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

#: By name: class prefix in transformers, options of its config, options of its tokenizer.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("Bert", BERT, {"types": True}),
    "bert-left": ("Bert", BERT, {"padding_side": "left"}),
    "roberta": ("Roberta", BERT, {}),
    "roberta-left": ("Roberta", BERT, {"padding_side": "left"}),
    "distilbert": ("DistilBert", {**DISTILBERT, **RANGE}, {}),
    "mpnet": ("MPNet", BERT, {}),
    "modernbert": ("ModernBert", {**BERT, **MODERNBERT, **ENDS, "sep_token_id": 3}, {}),
    "llama": ("Llama", {**DECODER, "eos_token_id": 3}, {"causal": True}),
    "mistral-left": ("Mistral", {**DECODER, "eos_token_id": 3}, CAUSAL_LEFT),
    "gpt2": ("GPT2", {**GPT2, "bos_token_id": 3, "eos_token_id": 3}, {"causal": True}),
    "gpt2-left": ("GPT2", {**GPT2, "bos_token_id": 3, "eos_token_id": 3}, CAUSAL_LEFT),
    "xlnet-left": ("XLNet", {**XLNET, "pad_token_id": 1}, {"padding_side": "left"}),
    "deberta": (
        "DebertaV2",
        {**BERT, **DEBERTA, "position_biased_input": False, "type_vocab_size": 0},
        {},
    ),
    "bart": (
        "Bart",
        {**BART, **ENDS, "init_std": 0.3, "pad_token_id": 1, **BART_ENDS},
        {},
    ),
    "t5": ("T5", {**T5, "pad_token_id": 1, "decoder_start_token_id": 1}, {}),
}


#: Inputs of BERT; others have no types.
TYPED = ("input_ids", "token_type_ids", "attention_mask")


def make_tokenizer(
    *, causal: bool = False, padding_side: str = "right", types: bool = False
) -> PreTrainedTokenizerFast:
    """Word by word, trained on the corpus.

    Args:
        causal: Without padding and special tokens.
        padding_side: `left` or `right`.
        types: With `token_type_ids`.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["[CLS]", "[PAD]", "[UNK]", "[SEP]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=specials))
    if causal:
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer,
            unk_token="[UNK]",
            eos_token="[SEP]",
            padding_side=padding_side,
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        padding_side=padding_side,
        model_input_names=[*TYPED[:: 1 if types else 2]],
    )


def save_model(
    folder: Path,
    architecture: str,
    labels: Sequence[str] = (),
    head: str = "",
    **options: Any,
) -> None:
    """Writes a model and its tokenizer.

    Args:
        folder: Where to.
        architecture: A key of `ARCHITECTURES`.
        labels: Of the head.
        head: As transformers calls it, such as `MaskedLM`; if unset, the model has one for
            sequence classification if there are labels, and otherwise none.
        options: Of the config.
    """
    prefix, config_options, tokenizer_options = ARCHITECTURES[architecture]
    tokenizer = make_tokenizer(**tokenizer_options)
    if labels:
        options = {**options, "id2label": dict(enumerate(labels))}
        options["label2id"] = {label: index for index, label in enumerate(labels)}
    config = getattr(transformers, f"{prefix}Config")(
        **{"vocab_size": len(tokenizer), **config_options, **options}
    )
    head = head or ("SequenceClassification" if labels else "")
    suffix = f"For{head}" if head else "Model"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, prefix + suffix)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_json(folder: Path, name: str, content: Any) -> None:
    """Writes a file of a model; its folder may be new."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def mend(library: Any) -> Any:
    """Gives a model of sentence-transformers what it needs to take any texts.

    Its own are a token for padding, and RoBERTa's limit, which is two less than its positions.
    """
    library.tokenizer.pad_token = library.tokenizer.pad_token or library.tokenizer.eos_token
    if library.config.model_type in ("roberta", "mpnet"):
        library.max_seq_length = min(library.max_seq_length, 78)
    return library


def run(model: Any, items: Sequence[Any], **keywords: Any) -> list[Any]:
    """One batch through all three stages; failed items keep their place."""
    prepared = model.preprocess(items, **keywords)
    fit = [each for each in prepared if not isinstance(each, Failed)]
    results = iter(model.postprocess(model.forward(fit, **keywords), **keywords) if fit else [])
    return [each if isinstance(each, Failed) else next(results) for each in prepared]
