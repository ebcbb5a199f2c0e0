"""The pooling that a model was trained with, from the files that sentence-transformers saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchery.errors import ModelLoadError
from batchery_worker.models.loading.source import ModelSource

#: sentence-transformers' names of the poolings that are built in, and ours.
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}

#: Its older files have one switch per pooling.
SWITCHES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}

#: Modules that need nothing more than what every embedding gets.
KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True)
class PoolingConfig:
    """What the files beside a model say.

    Attributes:
        pooling: `mean`, `cls` or `last`; None where they do not say.
        prompts: Texts to put in front, by name.
        default_prompt: Name of the prompt for texts that come without one.
    """

    pooling: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_pooling_config(source: ModelSource, pooling: str) -> PoolingConfig:
    """Reads the pooling config of a model; an empty one where the model has none.

    Args:
        source: The model.
        pooling: The setting. The files decide only if it is `auto`.

    Raises:
        ModelLoadError: The files ask for something that is not built in. Vectors made without it
            would look right and be wrong.
    """
    prompts, default_prompt = read_prompts(source)
    return PoolingConfig(
        pooling=_pooling(source) if pooling == "auto" else pooling,
        prompts=prompts,
        default_prompt=default_prompt,
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


def _pooling(source: ModelSource) -> str | None:
    modules: Sequence[Mapping[str, Any]] = source.json("modules.json") or ()
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    unknown = sorted(set(kinds) - KNOWN_MODULES)
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
