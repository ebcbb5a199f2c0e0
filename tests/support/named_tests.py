"""Tests that a page of the documentation names: `folder/test_file.py::test_name`."""

import ast
import re

from support.harness import TESTS


def find_functions(file: str) -> set[str]:
    """Names of the functions of a file of tests."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def check_named(cell: str) -> list[str]:
    """Makes sure that a cell names tests that exist, and nothing else; returns their names."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    assert cell == ", ".join(f"`{file}::{name}`" for file, name in named)
    for file, name in named:
        assert name in find_functions(file), f"{file} has no {name}"
    return [name for _, name in named]
