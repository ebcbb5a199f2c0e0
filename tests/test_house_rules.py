"""Rules of CONTRIBUTING.md that a linter does not know: sizes, names, paths."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = ("common", "producer", "worker", "tests", "benchmarks", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))

#: A file holds one noun.
MAX_FILE_LINES = 300

#: A test file may hold more: it is a list of cases, read one by one.
MAX_TEST_FILE_LINES = 500

#: A function fits on a screen; its docstring is not counted.
MAX_FUNCTION_LINES = 50


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in FILES
        if path.stem in sys.stdlib_module_names and not path.stem.startswith("__")
    ]
    assert not wrong, f"rename {wrong}: a reader, and sometimes Python, takes them for another"


@EACH_FILE
def test_a_file_holds_one_noun_and_few_lines(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = MAX_TEST_FILE_LINES if "tests" in path.relative_to(ROOT).parts else MAX_FILE_LINES
    assert lines <= limit, f"{lines} lines, at most {limit}: split by noun"


@EACH_FILE
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = [
        f"{node.name} (line {node.lineno}): {length} lines, at most {MAX_FUNCTION_LINES}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := function_lines(node)) > MAX_FUNCTION_LINES
    ]
    assert not long, f"{long}: split by step"


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
