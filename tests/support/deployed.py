"""What files of deploy/ name: commands, settings and metrics, each of which must exist."""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from batchery import Settings
from batchery.settings import PREFIX

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

#: A metric of ours or of Redis's exporter, with or without the ending that its type adds.
METRIC = re.compile(r"\b(?:batchery|redis)_[a-z_]+")


def check_environment(names: list[str]) -> None:
    """Checks that each variable of ours is a setting, such as BATCHERY_GATEWAY__KEYS."""
    for name in names:
        if name.startswith(PREFIX) and name != f"{PREFIX}SETTINGS_FILE":
            model: Any = Settings
            for part in name.removeprefix(PREFIX).lower().split("__"):
                assert part in model.model_fields, f"{name}: no setting {part}"
                model = find_model(model.model_fields[part].annotation)


def find_model(annotation: Any) -> Any:
    """The model of a table of the settings, which may be optional."""
    for each in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def find_metrics(text: str) -> set[str]:
    """The metrics that a text names, by their names in the documentation."""
    return {
        re.sub(r"_(?:bucket|sum|count)$", "", name) if "seconds" in name or "size" in name else name
        for name in METRIC.findall(text)
    }
