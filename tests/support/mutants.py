"""Do the tests notice a wrong line? Changes one operator at a time, and runs the module's tests.

    make mutants [ARGS="--count 80 --seed 7"]

`tests/unit/worker/batching/test_shares.py` are the tests of
`worker/batchery_worker/batching/shares.py`. A module without tests of its own has those of its
room; where there are none, nobody notices anything. The mutants are the same all week. Each runs in
a process of its own that imports the changed module; no file is touched.
"""

import argparse
import ast
import datetime
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: Which mutant a process of pytest has: the path of a module from the root, and a number.
VARIABLE = "BATCHERY_MUTANT"

#: How long the tests of a mutant may take, in seconds: a loop that never ends was noticed.
TIMEOUT_S = 120.0

#: Rooms and modules of decisions, which unit tests alone must hold.
ROOMS = (
    "common/batchery/execution",
    "common/batchery/protocol/figures.py",
    "common/batchery/protocol/headers.py",
    "common/batchery/transport/worker_registry.py",
    "producer/batchery_producer/answers.py",
    "producer/batchery_producer/collector.py",
    "producer/batchery_producer/files",
    "worker/batchery_worker/batching",
    "worker/batchery_worker/commit/eligibility.py",
    "worker/batchery_worker/commit/listeners.py",
    "worker/batchery_worker/dispatch/admission.py",
    "worker/batchery_worker/inprocess",
    "worker/batchery_worker/ipc/framing.py",
    "worker/batchery_worker/ipc/messages.py",
    "worker/batchery_worker/plain_values.py",
)

SWAPPED: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

Place = ast.Compare | ast.BoolOp | ast.BinOp | ast.AugAssign | ast.If


class Mutant(NamedTuple):
    """One changed place: the module's path from the root, and the number of the place."""

    path: str
    number: int

    @property
    def tests(self) -> list[Path]:
        """The unit tests of the module: `test_<its name>.py`, and those of its parts."""
        top, _, *folders, name = Path(self.path).with_suffix("").parts
        folder = ROOT.joinpath("tests", "unit", top, *folders)
        own = [*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py")]
        return sorted(own or folder.glob("test_*.py"))


def mutate(tree: ast.Module, number: int) -> tuple[int, str]:
    """Changes one place of a module; returns its line, and what was changed there."""
    node = find_places(tree)[number]
    changed = node.test if isinstance(node, ast.If) else node
    before = ast.unparse(changed)
    if isinstance(node, ast.If):
        node.test = changed = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    else:
        node.op = SWAPPED[type(node.op)]()
    ast.fix_missing_locations(tree)
    return node.lineno, f"{before} -> {ast.unparse(changed)}"


def find_places(tree: ast.Module) -> list[Place]:
    """What can be changed in a module, in the order of its text."""
    found = [node for node in ast.walk(tree) if isinstance(node, Place) and _can_change(node)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _can_change(node: Place) -> bool:
    if isinstance(node, ast.If):
        return True
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and type(node.ops[0]) in SWAPPED
    return type(node.op) in SWAPPED and not (
        isinstance(node, ast.BinOp) and (_is_text(node.left) or _is_text(node.right))
    )


def _is_text(node: ast.expr) -> bool:
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_string or isinstance(node, ast.JoinedStr)


class MutatingLoader(SourceFileLoader):
    """Loads the changed module."""

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache, and never into one."""
        tree = ast.parse(Path(self.path).read_bytes())
        mutate(tree, int(os.environ[VARIABLE].rpartition(":")[2]))
        return compile(tree, self.path, "exec")


class MutatingFinder(MetaPathFinder):
    """Finds the changed module before Python does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, with a loader that changes it."""
        if fullname.rpartition(".")[2] != self._path.stem:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or Path(spec.origin) != self._path:
            return None
        spec.loader = MutatingLoader(fullname, spec.origin)
        return spec


if VARIABLE in os.environ:
    # This is the plugin of a mutant's pytest.
    sys.meta_path.insert(0, MutatingFinder(ROOT / os.environ[VARIABLE].rpartition(":")[0]))


def all_mutants() -> Iterator[Mutant]:
    """Every place of every module of the rooms."""
    for room in ROOMS:
        place = ROOT / room
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            places = find_places(ast.parse(path.read_bytes()))
            name = str(path.relative_to(ROOT))
            yield from (Mutant(name, number) for number in range(len(places)))


def is_noticed(mutant: Mutant) -> bool:
    """Whether the tests of the module fail with it."""
    if not mutant.tests:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "support.mutants", "-p"]
    command += ["no:cacheprovider", *map(str, mutant.tests)]
    environment = {**os.environ, VARIABLE: f"{mutant.path}:{mutant.number}"}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


def main() -> None:
    """Prints the mutants that no test noticed, and how many were noticed."""
    today = datetime.datetime.now(datetime.UTC).isocalendar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=today.year * 100 + today.week)
    options = parser.parse_args()
    every = list(all_mutants())
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        noticed = list(threads.map(is_noticed, chosen))
    for mutant, was_noticed in zip(chosen, noticed, strict=True):
        if not was_noticed:
            line, change = mutate(ast.parse((ROOT / mutant.path).read_bytes()), mutant.number)
            print(f"{mutant.path}:{line}  {change}")
    print(f"{sum(noticed)} of {len(chosen)} mutants noticed, of {len(every)}; seed {options.seed}")


if __name__ == "__main__":
    main()
