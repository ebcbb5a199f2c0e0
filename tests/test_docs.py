"""The documentation is true: code blocks work, links lead somewhere, tables name what there is."""

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchery import ModelSettings, Settings
from batchery.gateway_settings import GatewaySettings, KeySettings
from batchery.metrics_settings import MetricsSettings
from batchery.settings import PREFIX, PriorityClass
from support.docs_page import follow
from support.harness import TESTS
from support.tiny_writers import save_writer

ROOT = TESTS.parent
PAGES = [
    ROOT / "README.md",
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


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, minilm_path: Path) -> Path:
    """A cache of the Hugging Face hub with the models that pages name by their ids.

    It has MiniLM; and, under the name of a model that writes texts, one with random weights.
    """
    cache = tmp_path_factory.mktemp("hub")
    writer = save_writer(tmp_path_factory.mktemp("writer"))
    models = {
        "sentence-transformers--all-MiniLM-L6-v2": minilm_path,
        "HuggingFaceTB--SmolLM2-135M-Instruct": writer,
    }
    for name, files in models.items():
        for folder in ("refs", "snapshots"):
            (cache / f"models--{name}" / folder).mkdir(parents=True)
        (cache / f"models--{name}" / "refs" / "main").write_text("installed")
        (cache / f"models--{name}" / "snapshots" / "installed").symlink_to(files)
    return cache


@EACH_PAGE
def test_every_code_block_does_what_the_page_says(
    path: Path, tmp_path: Path, redis_url: str, hub: Path
) -> None:
    environment = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    if path.name not in WITHOUT_REDIS:
        for variable in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL"):
            environment[variable] = redis_url
    follow(path, tmp_path, environment)


@EACH_PAGE
def test_every_block_is_fenced_and_nothing_is_hidden_in_comments(path: Path) -> None:
    for token in MarkdownIt().parse(path.read_text(encoding="utf-8")):
        line = (token.map or [0])[0] + 1
        assert token.type != "code_block", f"{path}:{line}: fence it, and name its language"
        hidden = token.type == "html_block" and "<!--" in token.content
        assert not hidden, f"{path}:{line}: a comment has no effect, and no reader sees it"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    return {
        slug(following.content)
        for token, following in pairwise(tokens)
        if token.type == "heading_open"
    }


@EACH_PAGE
def test_every_link_inside_the_repository_leads_somewhere(path: Path) -> None:
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    targets = [
        str(child.attrGet("href") or child.attrGet("src"))
        for token in tokens
        for child in token.children or ()
        if child.type in ("link_open", "image")
    ]
    for target in targets:
        name, _, anchor = target.partition("#")
        if ":" in name:
            continue
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name} links to {target}"


#: Where a page may begin a path: at the root, or in one of the three packages.
PLACES = [
    ROOT,
    ROOT / "common" / "batchery",
    ROOT / "producer" / "batchery_producer",
    ROOT / "worker" / "batchery_worker",
]

#: A source file in a folder, or a folder, as a page names it in backticks.
SOURCE = re.compile(r"[\w./-]*/[\w.-]+\.(?:py|lua)|[\w-]+/(?:[\w-]+/)*")

#: Maximum length of a line of prose, in characters; tables and code blocks are wider.
MAX_LINE_CHARS = 100


@EACH_PAGE
def test_every_source_file_that_a_page_names_exists(path: Path) -> None:
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    named = {
        child.content
        for token in tokens
        for child in token.children or ()
        if child.type == "code_inline" and SOURCE.fullmatch(child.content)
    }
    missing = [name for name in named if not any((place / name).exists() for place in PLACES)]
    assert not missing, f"{path.name} names {missing}"


def test_picture_of_the_folders_names_only_what_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT
    for line in page.partition("## Folders")[2].split("```")[1].splitlines()[1:]:
        if line and line[0].isalpha():
            package = ROOT / line.split()[0]
            assert package.is_dir(), line
        for name in re.findall(r"\b\w+(?:\.py|/(?=\s))", line):
            assert (package / name).exists(), f"{package}: no {name}"


@EACH_PAGE
def test_prose_is_wrapped_at_one_width(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    tokens = MarkdownIt().parse("\n".join(lines))
    code = {line for each in tokens if each.type == "fence" for line in range(*(each.map or [0]))}
    for number, line in enumerate(lines):
        if number not in code and not line.startswith("|"):
            assert len(line) <= MAX_LINE_CHARS, f"{path}:{number + 1}: {len(line)} characters"


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
