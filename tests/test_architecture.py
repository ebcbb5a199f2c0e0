"""What may import what, and what importing may do: the rules of docs/architecture.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Import package -> its folder.
PACKAGES = {
    "batchery": ROOT / "common" / "batchery",
    "batchery_producer": ROOT / "producer" / "batchery_producer",
    "batchery_worker": ROOT / "worker" / "batchery_worker",
}

#: Import package -> which of our packages it may import besides itself.
MAY_IMPORT = {
    "batchery": set[str](),
    "batchery_producer": {"batchery"},
    "batchery_worker": {"batchery"},
}

#: They take seconds and hundreds of megabytes; a producer and a worker's main process need neither.
HEAVY = {"numpy", "torch", "transformers"}

#: The only modules that may import torch and transformers, at any level.
DEVICE_SIDE = ("batchery_worker.device", "batchery_worker.models")

#: A client of its own, no part of a worker: it computes with the vectors that it gets back.
CLIENT_SIDE = {"batchery_worker.demo"}

#: Who may touch the environment besides settings.py, and why.
ENVIRONMENT = {
    "batchery.settings": "reads every setting",
    "batchery_worker.process": "hands its own environment on to the processes that it starts",
    "batchery_worker.stack": "hands its own environment on to the processes that it starts",
}


class Module(NamedTuple):
    name: str
    path: Path

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_device_side(self) -> bool:
        return any(self.name == each or self.name.startswith(f"{each}.") for each in DEVICE_SIDE)


class Import(NamedTuple):
    module: str
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def find_modules() -> list[Module]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found.append(Module(name, path))
    return found


MODULES = find_modules()
EACH_MODULE = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[Import]:
    """All imports, also those inside functions and those by `import_module("name")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.module or "", node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if called in ("import_module", "__import__"):
                yield Import(str(node.args[0].value), node.lineno)


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@EACH_MODULE
def test_a_package_imports_only_the_packages_that_it_may(module: Module) -> None:
    forbidden = set(PACKAGES) - MAY_IMPORT[module.package] - {module.package}
    wrong = [each for each in imports(parse(module.path)) if each.top in forbidden]
    assert not wrong, f"{module.name} imports {wrong}; see docs/architecture.md, rooms"


@EACH_MODULE
def test_only_the_device_side_imports_torch_and_transformers(module: Module) -> None:
    if not module.is_device_side:
        wrong = [each for each in imports(parse(module.path)) if each.top in HEAVY - {"numpy"}]
        assert not wrong, f"{module.name} imports {wrong}; only {DEVICE_SIDE} may"


# Imports the modules named in its arguments, one by one, where `refuse` cannot be imported.
IMPORT_ALONE = """
import importlib, importlib.abc, sys
refuse, heavy = sys.argv[1].split(","), sys.argv[2].split(",")

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in refuse:
            raise ModuleNotFoundError(f"{name} is refused")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[3:]:
    importlib.import_module(name)
    loaded = [each for each in heavy if each in sys.modules]
    if loaded:
        sys.exit(f"importing {name} loads {loaded}")
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_without_the_others_and_loads_nothing_heavy(package: str) -> None:
    refuse = set(PACKAGES) - MAY_IMPORT[package] - {package}
    names = [
        module.name
        for module in MODULES
        if module.package == package
        and not module.is_device_side
        and module.name not in CLIENT_SIDE
    ]
    done = run_python(IMPORT_ALONE, ",".join(refuse), ",".join(HEAVY), *names)
    assert done.returncode == 0, done.stderr


# Imports the modules named in its arguments and prints what ours do meanwhile, besides importing.
WATCH_IMPORTS = """
import importlib, os, sys
folders = tuple(sys.argv[1].split(","))
names = sys.argv[2:]
watched = ("open", "os.", "shutil.", "socket.", "subprocess.", "tempfile.", "urllib.")
harmless = ("os.fork", "os.listdir", "os.scandir", "os.register_at_fork", "socket.__new__")

def culprit():
    "Line of ours that is at work; None while somebody else's module or the import system is."
    frame = sys._getframe(2)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return None
        if frame.f_code.co_name == "<module>":
            ours = frame.f_code.co_filename.startswith(folders)
            return f"{frame.f_code.co_filename}:{frame.f_lineno}" if ours else None
        frame = frame.f_back

def report(what):
    where = culprit()
    if where:
        print(f"{where}: {what}")

def report_read(what):
    "Libraries may look at variables of their own, such as for the language of their texts."
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(folders):
        print(f"{frame.f_code.co_filename}:{frame.f_lineno}: {what}")

class Environment(type(os.environ)):
    def __getitem__(self, key):
        report_read(f"reads environment variable {key}")
        return super().__getitem__(key)

    def __iter__(self):
        report_read("reads the environment")
        return super().__iter__()

def audit(event, arguments):
    if event.startswith(watched) and event not in harmless:
        report(f"{event} {arguments!r}")

os.environ.__class__ = Environment
sys.addaudithook(audit)
for name in names:
    importlib.import_module(name)
"""


def test_importing_a_module_of_ours_does_no_io_and_reads_no_environment() -> None:
    folders = ",".join(str(folder) for folder in PACKAGES.values())
    done = run_python(WATCH_IMPORTS, folders, *(module.name for module in MODULES))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", done.stdout


def test_the_watch_over_imports_sees_a_module_that_reads_and_opens(tmp_path: Path) -> None:
    (tmp_path / "guilty.py").write_text(
        "import os, tempfile\nhome = os.environ.get('HOME')\nos.getenv('PATH')\n"
        "open(__file__).close()\n"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WATCH_IMPORTS}"
    lines = run_python(script, str(tmp_path), "guilty").stdout.splitlines()
    assert [line.split("guilty.py:")[1][:1] for line in lines] == ["2", "3", "4"]


def environment_lines(path: Path) -> list[int]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        node.lineno
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    ]


@EACH_MODULE
def test_only_the_settings_read_the_environment(module: Module) -> None:
    lines = environment_lines(module.path)
    if module.name in ENVIRONMENT:
        assert lines, f"{module.name} no longer does; remove it from ENVIRONMENT"
    else:
        assert not lines, f"{module.name} uses the environment in lines {lines}; make it a setting"
