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
    "zero_shot": {"labels": ("contradiction", "neutral", "entailment")},
    "token_classification": {"labels": ("O", "B-PER", "I-PER"), "head": "TokenClassification"},
}


def save_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes a model of each kind; returns the setting `models`, named by their kinds."""
    for kind, options in KINDS.items():
        save_model(folder / kind, "bert", **options)
    return {kind: {"kind": kind, "model": str(folder / kind)} for kind in KINDS}
