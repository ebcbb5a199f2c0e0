"""Which tasks callers may name."""

from collections.abc import Iterable

#: Beginnings of the names of Celery's own tasks, which run parts of workflows, and of ours.
INTERNAL = ("celery.", "batchery.gateway.")


def is_allowed(name: str, entries: Iterable[str]) -> bool:
    """Whether an allow list has a task.

    Args:
        name: Name of the task.
        entries: Names, or beginnings of names with a `*` behind them. Tasks of Celery itself and
            of the gateway must be named more closely than by `*` alone.
    """
    return any(
        name.startswith(entry[:-1]) if entry.endswith("*") else name == entry
        for entry in entries
        if not name.startswith(INTERNAL) or entry.startswith(INTERNAL)
    )
