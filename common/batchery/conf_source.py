"""Batchery's settings in a Celery configuration."""

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from batchery.errors import SettingsError


def from_conf(known: Collection[str], conf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the `batchery_<name>` entries of a Celery configuration.

    Args:
        known: Names of all settings.
        conf: The configuration.

    Returns:
        The settings by name.

    Raises:
        SettingsError: An entry names none of the settings; it would be silently ignored.
    """
    # An app with a namespace, as Django's have it, spells its settings CELERY_BATCHERY_...
    # Iterating also loads a configuration that Celery has put off, which `in` does not.
    keys = list(conf)
    namespace = str(getattr(conf, "prefix", None) or "")
    spelled = {
        key: key.removeprefix(namespace).lower().removeprefix("batchery_")
        for key in keys
        if key.removeprefix(namespace).lower().startswith("batchery_")
        and not isinstance(conf[key], ModuleType)
    }
    for key, name in spelled.items():
        if name not in known or f"batchery_{name}" not in conf:
            there = ", ".join(f"batchery_{each}" for each in sorted(known))
            raise SettingsError(f"app.conf.{key}: no such setting; there are {there}")
    return {name: conf[f"batchery_{name}"] for name in spelled.values()}
