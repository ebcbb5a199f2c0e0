"""docs/celery.md is true: a feature that works names tests, and these tests exist."""

import ast
import re

import pytest

from support.harness import TESTS

LINES = (TESTS.parent / "docs" / "celery.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if line.startswith("| ") and not line.startswith(("| Feature ", "| --- "))
]


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", ""))
def test_a_feature_that_works_names_its_tests_and_one_that_does_not_says_why(
    row: list[str],
) -> None:
    _, works, how, tests = row
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    if works == "yes":
        assert named
    else:
        assert works in ("not yet", "no")
        assert how
    assert tests == ", ".join(f"`{file}::{name}`" for file, name in named)
    for file, name in named:
        assert name in functions(file), f"{file} has no {name}"
