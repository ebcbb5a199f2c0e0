"""What a model was trained with besides its transformer: pooling, prompts, projection, from files.

sentence-transformers, PyLate and ColBERT save them beside the model.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from batchery.errors import ModelLoadError
from batchery_worker.models.source import ModelSource

#: sentence-transformers' names of the poolings that are built in, and ours.
POOLINGS = {
    **{each: each for each in ("mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean")},
    "lasttoken": "last",
}

#: Its older files have one switch per pooling.
SWITCHES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}

#: Where modules may come from. What a repository brings itself is not run.
LIBRARIES = ("sentence_transformers", "pylate")

#: The file of the transformer's module, by the names that it has had.
SENTENCE_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

#: Its fields that are honoured, or change no result here.
HARMLESS_FIELDS = {
    *("max_seq_length", "do_lower_case", "query_length", "document_length"),
    *("module_output_name", "unpad_inputs", "query_expansion"),
}

#: What settings decide here.
COMPUTING = ("torch_dtype", "dtype", "attn_implementation")

#: Parts of its other fields that change no result.
HARMLESS_PARTS: Mapping[str, set[str]] = {
    "transformer_task": {"feature-extraction", "fill-mask", "sequence-classification"},
    "modality_config": {"text", "message"},
    **{name: set(COMPUTING) for name in ("model_args", "model_kwargs")},
    **{name: {"padding_side"} for name in ("tokenizer_args", "processor_kwargs")},
}

#: Modules of a sparse model, and what its pooling must say.
SPLADE_MODULES = {"Transformer", "MLMTransformer", "SpladePooling"}
SPLADE = {"pooling_strategy": "max", "activation_function": "relu"}

#: In which order modules of vectors of texts may come.
ORDER = ("Transformer", "Pooling", "Dense", "Normalize")

#: Modules that need nothing more than what every embedding gets.
KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}


#: Functions behind a layer, by the last part of the name in its config.
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
}

#: Modules of sentence-transformers and PyLate that need no layer here. Normalizing is a keyword,
#: and which tokens count is decided where vectors are compared.
OTHER_MODULES = {"Transformer", "Normalize", "MultiVectorMask"}

#: The weights of ColBERT's own checkpoints, beside those of the transformer.
COLBERT_WEIGHT = "linear.weight"


def read_modules(source: ModelSource) -> list[tuple[str, str]]:
    """Kinds and folders of the modules of a model, in order; nothing where its files name none.

    Raises:
        ModelLoadError: One of them is code of the repository's own, which is not run.
    """
    modules: Sequence[Mapping[str, Any]] = source.json("modules.json") or ()
    for module in modules:
        if module["type"].partition(".")[0] not in LIBRARIES:
            raise ModelLoadError(
                f"model {source.name!r}: modules.json asks for {module['type']}, which is no module"
                f" of {' or '.join(LIBRARIES)}; choose another model"
            )
    return [(module["type"].rpartition(".")[2], module["path"]) for module in modules]


def read_sentence_config(source: ModelSource) -> Mapping[str, Any]:
    """What sentence-transformers says of the transformer: `max_seq_length`, `do_lower_case`.

    Raises:
        ModelLoadError: It says something that is not honoured. Results without it would look right
            and be wrong.
    """
    names = SENTENCE_CONFIGS if source.json("modules.json") else SENTENCE_CONFIGS[:1]
    found = next(((name, config) for name in names if (config := source.json(name))), None)
    if found is None:
        return {}
    name, config = found
    for field, value in config.items():
        if field in HARMLESS_FIELDS or not value:
            continue
        parts = [value] if isinstance(value, str | int | float) else value
        if not HARMLESS_PARTS.get(field, set()).issuperset(parts):
            raise ModelLoadError(
                f"model {source.name!r}: {name} has {field} = {value!r:.80}, which is not"
                " supported; choose another model"
            )
    known: Mapping[str, Any] = config
    return known


def read_lengths(source: ModelSource) -> Mapping[str, int]:
    """Maximum tokens of queries and of documents, by the names of their prompts."""
    general = source.json("config_sentence_transformers.json") or {}
    config = {**general, **(source.json(SENTENCE_CONFIGS[0]) or {})}
    lengths = {name: config.get(f"{name}_length") for name in ("query", "document")}
    return {name: int(length) for name, length in lengths.items() if length}


def check_splade(source: ModelSource) -> None:
    """Refuses a sparse model whose weights are not SPLADE's.

    Raises:
        ModelLoadError: Its files ask for other modules, or another way to make weights.
    """
    for kind, path in read_modules(source):
        if kind not in SPLADE_MODULES:
            raise _error(source, f"modules.json asks for {kind}, which is not built in")
        config = (source.json(f"{path}/config.json") if kind == "SpladePooling" else None) or {}
        for field, value in SPLADE.items():
            if config.get(field, value) != value:
                raise _error(
                    source, f"{path}/config.json has {field} = {config[field]!r}, not {value!r}"
                )


def read_prompts(source: ModelSource) -> tuple[Mapping[str, str], str | None]:
    """Reads the prompts of a model.

    Returns:
        Texts to put in front, by name; and the name of the one for texts that come without one,
        None if there is none.
    """
    general = source.json("config_sentence_transformers.json") or {}
    # PyLate has prefixes, which are tokens in front of the text.
    prefixes = {
        name: general[f"{name}_prefix"]
        for name in ("query", "document")
        if general.get(f"{name}_prefix")
    }
    return prefixes | (general.get("prompts") or {}), general.get("default_prompt_name")


def read_pooling(source: ModelSource) -> str | None:
    """Reads the pooling of a model, as we call it; None where its files do not say.

    Raises:
        ModelLoadError: They ask for something that is not built in. Vectors made without it would
            look right and be wrong.
    """
    kinds = dict(read_modules(source))
    unknown = sorted(set(kinds) - KNOWN_MODULES - {"Dense"})
    if unknown:
        raise _unsupported(source, f"modules.json asks for {', '.join(unknown)}")
    config = source.json(f"{kinds.get('Pooling', '1_Pooling')}/config.json")
    if config is None:
        return None
    modes = config.get("pooling_mode", [mode for key, mode in SWITCHES.items() if config.get(key)])
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise _unsupported(source, f"its pooling is {' and '.join(modes) or 'none'}")
    if config.get("include_prompt") is False:
        raise _unsupported(source, "its pooling leaves the prompt out")
    return POOLINGS[modes[0]]


def _unsupported(source: ModelSource, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"model {source.name!r}: {what}, which is not built in;"
        " set `pooling` to mean, cls or last to do without, or choose another model"
    )


class Projection(nn.Module):
    """One layer: a linear map, a function behind it, and sometimes a way around both."""

    def __init__(self, weights: Mapping[str, Tensor], activation: str, *, around: bool) -> None:
        """Takes the weights as they are, in float32.

        Args:
            weights: `linear.weight`, (D, H); perhaps `linear.bias` and `residual.weight`.
            activation: A key of `ACTIVATIONS`.
            around: Whether the input is added to the output, by `residual.weight` if it is there.
        """
        super().__init__()
        self.linear = _linear(weights["linear.weight"], weights.get("linear.bias"))
        self.activation = ACTIVATIONS[activation]()
        residual = weights.get("residual.weight")
        self.residual = nn.Identity() if residual is None else _linear(residual)
        self._around = around

    def forward(self, vectors: Tensor) -> Tensor:
        """Projects vectors, (T, D) from (T, H)."""
        projected: Tensor = self.activation(self.linear(vectors))
        return projected + self.residual(vectors) if self._around else projected


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.float())
    if bias is not None:
        layer.bias = nn.Parameter(bias.float())
    return layer


def read_projection(source: ModelSource, width: int) -> nn.Sequential:
    """Reads the projection of a model; it has no layers where the model has none.

    Raises:
        ModelLoadError: Files are missing, do not fit the model, or ask for something that is not
            built in.
    """
    kinds = read_modules(source)
    if not kinds:
        layers = _colbert(source)
    else:
        # What is behind a pooling works on one vector per text.
        kinds = [*takewhile(lambda each: each[0] != "Pooling", kinds)]
        unknown = sorted({kind for kind, _ in kinds} - OTHER_MODULES - {"Dense"})
        if unknown:
            raise _error(source, f"modules.json asks for {', '.join(unknown)}, not built in")
        layers = [_dense(source, path) for kind, path in kinds if kind == "Dense"]
    return _joined(source, layers, width)


def _joined(source: ModelSource, layers: Sequence[Projection], width: int) -> nn.Sequential:
    """Layers one behind the other. Raises ModelLoadError: they do not fit vectors of this width."""
    for layer in layers:
        if layer.linear.in_features != width:
            taken = layer.linear.in_features
            raise _error(
                source, f"its projection takes {taken} numbers, and its vectors have {width}"
            )
        width = layer.linear.out_features
    return nn.Sequential(*layers)


def read_dense(source: ModelSource, width: int) -> nn.Sequential:
    """Reads the layers behind the pooling of a model; there are none where the model has none.

    Raises:
        ModelLoadError: As for `read_projection`; or they are not between pooling and normalizing.
    """
    modules = read_modules(source)
    kinds = [kind for kind, _ in modules]
    if "Dense" in kinds and kinds != sorted(kinds, key=ORDER.index):
        raise _unsupported(source, f"modules.json has the order {', '.join(kinds)}")
    layers = [_dense(source, path) for kind, path in modules if kind == "Dense"]
    return _joined(source, layers, width)


def _dense(source: ModelSource, path: str) -> Projection:
    config = source.json(f"{path}/config.json") or {}
    activation = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise _error(source, f"{path}/config.json asks for {activation}, which is not built in")
    weights = _weights(source, f"{path}/model.safetensors")
    if "linear.weight" not in weights:
        raise _error(source, f"{path} has no linear.weight in model.safetensors")
    return Projection(weights, activation, around=bool(config.get("use_residual")))


def _colbert(source: ModelSource) -> list[Projection]:
    index = source.json("model.safetensors.index.json") or {}
    name = index.get("weight_map", {}).get(COLBERT_WEIGHT, "model.safetensors")
    weights = _weights(source, name)
    if COLBERT_WEIGHT not in weights:
        return []
    return [Projection({COLBERT_WEIGHT: weights[COLBERT_WEIGHT]}, "Identity", around=False)]


def _weights(source: ModelSource, name: str) -> Mapping[str, Tensor]:
    path: Path | None = source.path(name)
    weights: Mapping[str, Tensor] = {} if path is None else load_file(path)
    return weights


def _error(source: ModelSource, what: str) -> ModelLoadError:
    return ModelLoadError(f"model {source.name!r}: {what}; choose another model")
