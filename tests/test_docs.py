"""The documentation is true: code blocks work, tables name what there is.

The README is followed in `tests/promises`; `mkdocs --strict` checks links.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchery import ModelSettings, Settings
from batchery.gateway_settings import GatewaySettings, KeySettings
from batchery.metrics_settings import MetricsSettings
from batchery.settings import PREFIX, PriorityClass
from support.docs_page import follow
from support.harness import TESTS

ROOT = TESTS.parent
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
EACH_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

#: What these pages do needs no Redis, they say. Variables would outrank what they set.
WITHOUT_REDIS = {"testing.md"}

#: Keyword of a JSON schema -> how the reference says it.
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [each for each in os.environ if each.startswith(PREFIX)]:
        monkeypatch.delenv(variable)


@EACH_PAGE
def test_every_code_block_does_what_the_page_says(
    path: Path, tmp_path: Path, redis_url: str, hub: Path
) -> None:
    environment = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    if path.name not in WITHOUT_REDIS:
        for variable in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL"):
            environment[variable] = redis_url
    follow(path, tmp_path, environment)


def values(schema: dict[str, Any]) -> str:
    """What a setting may be, in words, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(values(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return "list"
    if schema.get("type") == "object" or "$ref" in schema:
        return "table"
    limits = [text.format(schema[key]) for key, text in LIMITS.items() if key in schema]
    return " ".join([schema["type"], ", ".join(limits)]).strip()


def default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return ""
    if isinstance(field.default, BaseModel):
        return "`{}`"
    if isinstance(field.default, dict):
        tables = {name: each.model_dump(exclude_unset=True) for name, each in field.default.items()}
        return f"`{tables!r}`"
    text = field.default if isinstance(field.default, str) else repr(field.default)
    return f"`{str(text).lower() if isinstance(field.default, bool) else text}`"


def table(model: type[BaseModel], *, variables: bool) -> str:
    """The reference table of a settings model, as docs/settings.md must have it."""
    heads = ["Setting", *(["Variable"] if variables else []), "Value", "Default", "Meaning"]
    lines = [heads, ["---"] * len(heads)]
    schemas = model.model_json_schema()["properties"]
    # Fields of its own stand before those that it inherits: `kind` and `model` come first.
    own = model.__annotations__
    fields = sorted(model.model_fields.items(), key=lambda each: each[0] not in own)
    for name, field in fields:
        variable = [f"`{PREFIX}{name.upper()}`"] if variables else []
        spelled = field.alias or name
        meaning = [values(schemas[spelled]), default(field), str(field.description)]
        lines.append([f"`{spelled}`", *variable, *meaning])
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


@pytest.mark.parametrize(
    ("model", "variables"),
    [
        (Settings, True),
        (PriorityClass, False),
        (ModelSettings, False),
        (GatewaySettings, False),
        (KeySettings, False),
        (MetricsSettings, False),
    ],
)
def test_the_reference_names_every_setting_as_it_is(
    model: type[BaseModel], variables: bool
) -> None:
    expected = table(model, variables=variables)
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert expected in page, f"replace the table in docs/settings.md by this one:\n\n{expected}"
