"""Rows of arrays that are results: whoever keeps one keeps no whole batch."""

import sys
from operator import is_not
from typing import Any


def own_rows(outcome: Any) -> Any:
    """An outcome whose arrays keep at most twice their own memory alive: others are copied.

    Neither numpy nor torch is loaded for that.
    """
    kind = type(outcome)
    if kind is dict:
        named = {name: own_rows(each) for name, each in outcome.items()}
        return named if any(map(is_not, named.values(), outcome.values())) else outcome
    if kind is tuple:
        parts = tuple(map(own_rows, outcome))
        return parts if any(map(is_not, parts, outcome)) else outcome
    if hasattr(kind, "nbytes"):
        if _is_tensor(outcome):
            whole = outcome.untyped_storage().nbytes()
            return outcome.clone() if 2 * outcome.nbytes < whole else outcome
        whole = getattr(getattr(outcome, "base", None), "nbytes", 0)
        return outcome.copy() if 2 * outcome.nbytes < whole else outcome
    return outcome


def _is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; then torch is loaded."""
    torch = sys.modules.get("torch")
    # While another thread imports torch, it has no tensors yet.
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))
