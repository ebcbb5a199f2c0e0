"""Sends jobs of `apps.cached`, and counts which items were computed."""

from collections import Counter
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from support.patience import TIMEOUT_S


def computed(log: Path) -> Counter[str]:
    """The computed items, from the file that their jobs got as `path`."""
    return Counter(log.read_text().split("\n")[:-1])


def send(client: Celery, task: str, *items: Any, **keywords: Any) -> list[AsyncResult[Any]]:
    return [client.send_task(f"apps.cached.{task}", [item], keywords) for item in items]


def answers(jobs: list[AsyncResult[Any]]) -> list[Any]:
    return [job.get(timeout=TIMEOUT_S) for job in jobs]
