"""The argument of a batch function: a list of items, and with `pydantic=True` a list of models."""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from celery import Task
from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from batchery.errors import BatchArgumentError, InvalidItem
from batchery.execution.bisect_failures import to_plain
from batchery.outcomes import Failed

#: Annotations of functions that take one item.
SINGLE_ITEMS = (str, bytes, int, float, bool, dict)


class ItemModels:
    """Does with items and outcomes what `pydantic=True` of Celery does with arguments and results.

    The options are Celery's: `pydantic_strict`, `pydantic_context` and `pydantic_dump_kwargs`.
    """

    def __init__(self, task: str, function: Callable[..., Any], argument: str) -> None:
        """Reads the type of the items from the annotation, such as `list[Text]`.

        Args:
            task: Its name.
            function: The task's, as Celery has wrapped it.
            argument: Name of the argument that gets the items.

        Raises:
            BatchArgumentError: It is not annotated as a list of something that pydantic knows.
        """
        # Celery keeps these options nowhere else.
        own = inspect.getclosurevars(function).nonlocals
        self._task, self._dump_options = task, own["dump_kwargs"]
        try:
            found = get_type_hints(function, include_extras=True).get(argument)
            origin, inner = get_origin(found), get_args(found)
            if not (isinstance(origin, type) and issubclass(list, origin) and len(inner) == 1):
                raise TypeError(f"found {found or 'no annotation'}")
            model = SimpleNamespace(model_validate=TypeAdapter(inner[0]).validate_python)
        except (AttributeError, NameError, PydanticUserError, TypeError) as error:
            problem = (
                f"pydantic=True needs the type of items; annotate {argument!r} as list[MyModel]"
            )
            raise BatchArgumentError(f"{task}: {problem}: {error}") from None
        self._read = partial(own["validate_argument"], model)

    def validate(self, item: Any) -> Any:
        """The item as the function gets it, or why there is none."""
        try:
            return self._read(item)
        except ValidationError as error:
            first = error.errors()[0]
        place = "".join(f".{each}" for each in first["loc"])
        return Failed(InvalidItem(f"{self._task}: item{place}: {first['msg']}"))

    def dump(self, outcome: Any) -> Any:
        """The outcome, as plain data if it is a model."""
        is_model = isinstance(outcome, BaseModel)
        return outcome.model_dump(**self._dump_options) if is_model else to_plain(outcome)

    def dump_arguments(self, others: Any, args: Any, kwargs: Any) -> Any:
        """What a caller sends; `others` is Celery's function, for the keywords."""
        return others(tuple(map(self._dump_item, args or ())), kwargs)

    def _dump_item(self, item: Any) -> Any:
        # As Celery: a model with kombu's hook goes as it is, and so does one that would not be
        # equal after the journey, for the serializer to refuse it.
        if not isinstance(item, BaseModel) or hasattr(type(item), "__json__"):
            return item
        try:
            dumped = item.model_dump(**self._dump_options)
            return dumped if self._read(dumped) == item else item
        except Exception:  # noqa: BLE001 - the model's own code, which may need a worker
            return item


def check_function(task: Any) -> None:
    """Makes sure that the function of a task can be given a list of items; reads `pydantic=True`.

    One that was written for a single item would mix up the results of callers without a word.

    Raises:
        BatchArgumentError: It takes no argument, its first one is annotated as a single item, or
            pydantic is to validate items of unknown type.
    """
    run: Any = inspect.getattr_static(task, "run")
    if run is inspect.getattr_static(Task, "run"):
        return
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
    if (others := vars(task).get("_dump_pydantic_arguments")) is not None:
        task.item_models = models = ItemModels(task.name, function, first.name)
        dump = partial(models.dump_arguments, others.__func__)
        task._dump_pydantic_arguments = staticmethod(dump)
