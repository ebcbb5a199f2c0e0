"""The tasks that workers have, over Celery's remote control: names, queues, aliases."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery
from celery.app.control import flatten_reply

#: A task in the answer to `celery inspect registered FIELD ...`: `name [field=value field=value]`.
ANSWER = re.compile(r"(?P<name>\S+)(?: \[(?P<fields>.*)\])?")

#: Where one of its fields ends and the next one begins.
NEXT_FIELD = re.compile(r" (?=\w+=)")

#: Maximum number of tasks that a message names.
MAX_NAMED = 8

#: Attributes of a task, by task, by worker.
Registered = Mapping[str, Mapping[str, Mapping[str, str]]]


def registered_tasks(
    app: Celery, fields: Iterable[str], timeout_s: float, limit: int | None = None
) -> Registered:
    """Asks workers for their tasks, without Celery's own.

    Args:
        app: The app whose broker is asked.
        fields: Attributes of tasks; an answer has those that are not None, as text.
        timeout_s: How long answers are collected, in seconds.
        limit: Number of answers that are enough; None for all workers'.
    """
    arguments = {"taskinfoitems": list(fields)}
    replies = app.control.broadcast(
        "registered", arguments=arguments, reply=True, timeout=timeout_s, limit=limit
    )
    return parse_registered(flatten_reply(replies or []))


def parse_registered(answers: Mapping[str, Any]) -> Registered:
    """Reads each worker's answer; one that is no list of tasks is left out."""
    return {
        worker: dict(map(_parse, tasks))
        for worker, tasks in sorted(answers.items())
        if isinstance(tasks, list)
    }


def _parse(task: str) -> tuple[str, Mapping[str, str]]:
    found = ANSWER.fullmatch(task)
    if found is None:
        return task, {}
    pairs = [field.partition("=") for field in NEXT_FIELD.split(found["fields"] or "") if field]
    return found["name"], {name: value for name, _, value in pairs}


def aliases_in(info: Mapping[str, str]) -> list[str]:
    """The aliases of a model, which its worker spells in one text."""
    return [alias for alias in info.get("model_aliases", "").split(",") if alias]


def name_tasks(name: str, names: Iterable[str]) -> str:
    """Says which tasks there are, those with a similar name first, for an error's text."""
    there = sorted(set(names))
    if not there:
        return "there are none"
    near = difflib.get_close_matches(name, there, n=1)
    question = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(there) - MAX_NAMED} more" if len(there) > MAX_NAMED else ""
    return f"{question}there are {', '.join(there[:MAX_NAMED])}{more} (see `batchery models`)"
