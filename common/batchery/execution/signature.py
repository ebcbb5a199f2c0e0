"""What the function of a batch task looks like: it takes a list of items."""

import inspect
from typing import Any, get_origin

from celery import Task

from batchery.errors import BatchArgumentError

#: Annotations of functions that take one item.
SINGLE_ITEMS = (str, bytes, int, float, bool, dict)


def check_function(task: Any) -> None:
    """Makes sure that the function of a task can be given a list of items.

    One that was written for a single item would mix up the results of callers without a word.

    Raises:
        BatchArgumentError: It takes no argument, its first one is annotated as a single item, or
            Celery is to validate it by pydantic.
    """
    run: Any = inspect.getattr_static(task, "run")
    if run is inspect.getattr_static(Task, "run"):
        return
    if vars(task).get("_dump_pydantic_arguments") is not None:
        raise BatchArgumentError(
            f"{task.name}: pydantic=True validates one item, and a batch has many; validate each in"
            " the function, where one that raises fails alone"
        )
    is_static = isinstance(run, staticmethod)
    function = run.__func__ if is_static else run
    parameters = list(inspect.signature(function).parameters.values())[not is_static :]
    first = parameters[0] if parameters else None
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise BatchArgumentError(f"{task.name}: its function takes no argument; it gets a list")
    of = get_origin(first.annotation) or first.annotation
    if of in SINGLE_ITEMS or of in {each.__name__ for each in SINGLE_ITEMS}:
        name = of if isinstance(of, str) else of.__name__
        raise BatchArgumentError(
            f"{task.name}: its argument {first.name!r} is annotated {name}, but it gets a list of"
            f" items: loop over them, return one result for each, and annotate list[{name}]"
        )
