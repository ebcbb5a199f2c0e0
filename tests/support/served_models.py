"""Tiny models of every kind that the gateway has routes for, as settings."""

from pathlib import Path
from typing import Any

from support.tiny_models import save_model

LABELS = ("sad", "calm", "glad")

#: By kind: what `save_model` needs.
KINDS: dict[str, dict[str, Any]] = {
    "embedding": {},
    "classification": {"labels": LABELS},
    "rerank": {"labels": ("relevance",)},
    "sparse_embedding": {"head": "MaskedLM"},
    "multi_vector_embedding": {},
}


#: Writes each message of a chat on a line of its own, behind the names of tools.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }}\n{% endfor %}"
)


def save_writer(folder: Path, *, has_template: bool = True) -> dict[str, Any]:
    """Writes a model that writes texts of up to 4096 tokens; returns its settings."""
    save_model(folder, "llama", head="CausalLM", max_position_embeddings=4096)
    if has_template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {"kind": "generation", "model": str(folder), "slots": 8, "cache_tokens": 16_384}


def save_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes a model of each kind; returns the setting `models`, named by their kinds."""
    for kind, options in KINDS.items():
        save_model(folder / kind, "bert", **options)
    found = {kind: {"kind": kind, "model": str(folder / kind)} for kind in KINDS}
    # Whoever makes up requests asks for as many tokens as there may be.
    writer = {**save_writer(folder / "generation"), "max_new_tokens": 20, "max_length": 64}
    return {**found, "generation": writer}
