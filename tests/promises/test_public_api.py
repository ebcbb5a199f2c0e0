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

ROOT = Path(__file__).resolve().parents[2]
DOORS = sorted(
    path
    for folder in ("common", "producer", "worker")
    for path in ROOT.glob(f"{folder}/*/__init__.py")
)
EACH_DOOR = pytest.mark.parametrize("path", DOORS, ids=lambda path: path.parent.name)

#: What a door imports from the standard library, to load names when they are first used.
LAZY_MEANS = {"TYPE_CHECKING", "Any", "importlib"}


def exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
            names: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return names
    raise AssertionError(f"{path} has no __all__")


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def bound_names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.If) and is_type_checking(node):
            names |= bound_names(node.body)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return names


def public_names(path: Path) -> set[str]:
    """Names that users may import: bound at the top level or lazily, without an underscore."""
    names = bound_names(ast.parse(path.read_text(encoding="utf-8")).body) - LAZY_MEANS
    return {name for name in names if not name.startswith("_")}


@EACH_DOOR
def test_all_is_sorted_and_names_everything_public_once(path: Path) -> None:
    names = exported(path)
    assert names == sorted(set(names))
    assert set(names) == public_names(path)


@EACH_DOOR
def test_every_public_object_has_a_docstring_of_its_own(path: Path) -> None:
    package = importlib.import_module(path.parent.name)
    assert package.__doc__
    silent = [name for name in exported(path) if not getattr(package, name).__doc__]
    assert not silent


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    body = ast.parse(DOORS[0].read_text(encoding="utf-8")).body
    seen = bound_names([node for node in body if is_type_checking(node)])
    assert seen | set(error_classes()) == set(batchery._MODULES)
    assert seen <= set(dir(batchery))


def test_the_door_has_every_name_of_the_producer() -> None:
    assert set(batchery_producer.__all__) <= set(batchery._MODULES)


def test_an_unknown_name_of_the_door_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'batchery' has no attribute 'Clint'"):
        batchery.Clint  # noqa: B018


def drawn_tree() -> dict[str, tuple[str, str]]:
    """Name -> parent and description, as the docstring of errors.py draws them."""
    drawing = inspect.cleandoc(batchery.errors.__doc__ or "").split("```")[1].strip().splitlines()
    ancestors: dict[int, str] = {-1: "Exception"}
    tree: dict[str, tuple[str, str]] = {}
    for line in drawing:
        name, _, description = line.lstrip("│├└─ ").partition(" ")
        depth = line.index(name) // 4
        ancestors[depth] = name
        tree[name] = ancestors[depth - 1], description.strip()
    return tree


def error_classes() -> dict[str, type[BatcheryError]]:
    return {
        name: value
        for name, value in vars(batchery.errors).items()
        if inspect.isclass(value) and issubclass(value, BatcheryError)
    }


def test_the_tree_drawn_in_errors_is_the_real_one() -> None:
    real = {name: value.__base__.__name__ for name, value in error_classes().items()}  # type: ignore[union-attr]
    assert {name: parent for name, (parent, _) in drawn_tree().items()} == real


def test_the_drawn_tree_names_every_second_base() -> None:
    for name, error in error_classes().items():
        others = [base.__name__ for base in error.__bases__[1:]]
        said = drawn_tree()[name][1].partition("; also a ")[2]
        assert ([said] if said else []) == others, name


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
