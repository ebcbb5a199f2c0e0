"""Rules of CONTRIBUTING.md that a linter does not know: sizes, names, paths."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("common", "producer", "worker")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PRODUCT = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES]

#: Maximum length of a file, tests included.
MAX_FILE_LINES = 600

#: Maximum length of a function without its docstring: it fits on a screen.
MAX_FUNCTION_LINES = 50


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def place(path: Path, line: int = 1) -> str:
    """Where it is, as an editor can follow it."""
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    names = {name for name in sys.stdlib_module_names if not name.startswith("__")}
    wrong = [place(path) for path in FILES if path.stem in names]
    assert not wrong, f"rename {wrong}: a reader, and sometimes Python, takes them for another"


def test_class_name_has_one_meaning_in_all_packages() -> None:
    places = defaultdict(list)
    for path in PRODUCT:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place(path, node.lineno))
    twice = {name: where for name, where in places.items() if where[1:]}
    assert not twice, f"rename all but one of each: {twice}"


def test_functions_begin_with_a_verb_and_do_not_end_in_of() -> None:
    wrong = [
        f"{place(path, node.lineno)} {node.name}"
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.endswith("_of")
    ]
    assert not wrong, f"say what it does: {wrong}"


def test_constants_are_not_called_most() -> None:
    wrong = [
        f"{place(path, node.lineno)} {node.id}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Name) and node.id.lstrip("_").startswith("MOST_")
    ]
    assert not wrong, f"say MAX_: {wrong}"


def test_files_are_not_too_long() -> None:
    lengths = {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {where: length for where, length in lengths.items() if length > MAX_FILE_LINES}
    assert not long, f"more than {MAX_FILE_LINES} lines, split by noun: {long}"


def test_functions_are_not_too_long() -> None:
    long = [
        f"{place(path, node.lineno)} {node.name}: {length}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := function_lines(node)) > MAX_FUNCTION_LINES
    ]
    assert not long, f"more than {MAX_FUNCTION_LINES} lines, split by step: {long}"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_no_file_names_a_path_of_somebody_s_machine() -> None:
    homes = (b"/home/", b"/Users/", b"C:\\Users\\", str(ROOT).encode())
    allowed = {Path(__file__).resolve()}
    wrong = [
        f"{path.relative_to(ROOT)}: {home.decode()}"
        for path in repository_files()
        if path not in allowed
        for home in homes
        if home in (content := path.read_bytes()) and b"\0" not in content
    ]
    assert not wrong, wrong


def test_type_checkers_are_told_that_each_package_has_types() -> None:
    names = [path.parent.name for folder in PACKAGES for path in (ROOT / folder).glob("*/py.typed")]
    assert sorted(names) == ["batchery", "batchery_producer", "batchery_worker"]


def test_pre_commit_runs_what_make_lint_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    [hook] = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert (hook["entry"], hook["pass_filenames"]) == ("make lint", False)
