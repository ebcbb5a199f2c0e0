"""Writes the tables of docs/settings.md, which are made from the models of the settings.

A comment such as `<!-- made from GatewaySettings -->` stands above each table. `--check` writes
nothing, and fails if a table is not as it should be.
"""

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchery import ModelSettings, Settings
from batchery.gateway_settings import GatewaySettings, KeySettings
from batchery.media_settings import MediaSettings
from batchery.settings import PREFIX, MetricsSettings, PriorityClass

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

TABLES = (
    *(Settings, PriorityClass, ModelSettings, GatewaySettings, KeySettings),
    *(MediaSettings, MetricsSettings),
)

#: A comment, and the table below it.
TABLE = re.compile(r"(<!-- made from (\w+) -->\n\n)((?:\|.*\n)*)")

#: Keyword of a JSON schema -> how the page says it.
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
}


def describe_values(schema: dict[str, Any]) -> str:
    """What a setting may be, in words, from its JSON schema."""
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(map(describe_values, kinds))
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


def describe_default(field: FieldInfo) -> str:
    """The default in code, in words where there is none, and empty where it is not set."""
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


def make_table(model: type[BaseModel]) -> str:
    """The table of a model."""
    has_variables = model is Settings
    heads = ["Setting", *(["Variable"] if has_variables else []), "Value", "Default", "Meaning"]
    lines = [heads, ["---"] * len(heads)]
    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        spelled = field.alias or name
        variable = [f"`{PREFIX}{name.upper()}`"] if has_variables else []
        values = describe_values(schemas[spelled]), describe_default(field)
        lines.append([f"`{spelled}`", *variable, *values, str(field.description)])
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def main() -> None:
    """Writes the page, or checks it."""
    models = {each.__name__: each for each in TABLES}
    text = PAGE.read_text(encoding="utf-8")
    made = TABLE.sub(lambda found: found[1] + make_table(models[found[2]]), text)
    if "--check" not in sys.argv:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        sys.exit(f"{PAGE.name} is not up to date: run `python .ci/settings_page.py`")


if __name__ == "__main__":
    main()
