"""The public door: what `__all__` promises, and errors that arrive as they were raised."""

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest
from celery import Celery

import batchery
import batchery.errors
import batchery_producer
from batchery.errors import BatcheryError


def test_type_checkers_see_every_name_where_it_is() -> None:
    stub = Path(batchery.__file__).with_suffix(".pyi")
    imports = [
        node
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
    ]
    seen = {name.name: node.module or "" for node in imports for name in node.names}
    assert sorted(seen) == batchery.__all__
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(batchery, name)
    assert set(batchery.__all__) <= set(dir(batchery))


def test_the_door_has_every_name_of_the_producer() -> None:
    assert set(batchery_producer.__all__) <= set(batchery.__all__)


def test_an_unknown_name_of_the_door_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'batchery' has no attribute 'Clint'"):
        batchery.Clint  # type: ignore[attr-defined]  # noqa: B018


def error_classes() -> dict[str, type[BatcheryError]]:
    return {
        name: value
        for name, value in vars(batchery.errors).items()
        if inspect.isclass(value) and issubclass(value, BatcheryError)
    }


def test_every_error_is_public() -> None:
    assert set(error_classes()) <= set(batchery.__all__)


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_an_error_survives_the_trip_through_a_json_result_backend(name: str) -> None:
    error = error_classes()[name](f"{name}: what was wrong; what to do")
    app = Celery(set_as_current=False, backend="cache+memory://")
    sent = app.backend.prepare_exception(error, serializer="json")
    back = app.backend.exception_to_python(json.loads(json.dumps(sent)))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args
