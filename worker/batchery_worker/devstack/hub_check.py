"""Checks that the models of the settings can be had, before a worker is started for them."""

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings

#: How long the hub may take to answer, in seconds; its own client tries for minutes.
TIMEOUT_S = 5.0


def check_hub(models: Mapping[str, ModelSettings]) -> None:
    """Makes sure that models which are not on this machine can be downloaded.

    Raises:
        ModelLoadError: One is not here, and the hub does not answer, or must not be asked.
    """
    missing = [name for name, model in models.items() if not _is_here(model)]
    if not missing or importlib.util.find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_silent(constants.ENDPOINT)
    if why:
        first = missing[0]
        raise ModelLoadError(
            f"model {first!r}: {models[first].model} is not on this machine, and the hub at"
            f" {constants.ENDPOINT} does not answer: {why}; name a local folder, or a mirror in"
            " HF_ENDPOINT"
        )


def _is_here(model: ModelSettings) -> bool:
    if (
        Path(model.model).expanduser().exists()
        or importlib.util.find_spec("huggingface_hub") is None
    ):
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except HFValidationError:
        return True  # It is no id of the hub: the worker names what is wrong with it.
    return isinstance(found, str)


def _why_silent(endpoint: str) -> str:
    """Why the hub does not answer; empty if it does, whatever it says."""
    try:
        urllib.request.urlopen(endpoint, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        return str(getattr(error, "reason", error))
    return ""
