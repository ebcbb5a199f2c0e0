"""How a test has a device hold more jobs than it can begin."""

from pathlib import Path

from celery import Celery

from apps import singles

#: As many as an idle device takes at once, of tasks of which it can begin one.
JOBS = 3


def send_to_be_held(redis_url: str, directory: Path, queue: str | None = None) -> list[str]:
    """Sends a job of each of some tasks of `apps.singles`; returns their ids.

    A worker that is started then takes all of them together, and its device runs one of them.

    Args:
        redis_url: Where they go.
        directory: Of the book that has their numbers, and of the gate that they wait for.
        queue: None for the own one of each task.
    """
    options = {"book": str(directory / "book"), "gate": str(directory / "gate")}
    with Celery("sender", broker=redis_url, set_as_current=False) as app:
        return [
            app.send_task(task.name, [number], options, queue=queue or task.name).id
            for number, task in enumerate(singles.TASKS[:JOBS])
        ]
