"""What importing may do, and who may read the environment.

What may import what is in pyproject.toml, where import-linter reads it.
"""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]

#: Import package -> its folder.
PACKAGES = {
    "batchery": ROOT / "common" / "batchery",
    "batchery_producer": ROOT / "producer" / "batchery_producer",
    "batchery_worker": ROOT / "worker" / "batchery_worker",
}

#: They take seconds and hundreds of megabytes; a producer and a worker's main process need neither.
HEAVY = {"numpy", "torch", "transformers"}

#: Import package -> what importing all of it must not load.
UNWANTED = {
    "batchery": HEAVY | {"batchery_producer", "batchery_worker"},
    "batchery_producer": HEAVY | {"batchery_worker"},
    "batchery_worker": HEAVY | {"batchery_producer"},
}

#: Who may load what is heavy: the device's process, and who computes with vectors.
HEAVY_MODULES = (
    "batchery_worker.device.",
    "batchery_worker.models.",
    "batchery_producer.gateway.",
)

#: Who may touch the environment, and why.
ENVIRONMENT = {
    "batchery.settings": "reads every setting",
    "batchery_producer.gateway.server": "tells its processes where they share their metrics",
    "batchery_worker.device_pool.process": "hands its own on to the processes that it starts",
    "batchery_worker.devstack.stack": "hands its own on to the processes that it starts",
    "batchery_worker.models.openai_server.vllm_server": "hands its own on to the engine",
}


def find_modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


#: Modules that import a package which comes only with torch for CUDA -> the package.
NEEDS = {"batchery_worker.models.generation.page_kernel": "triton"}

MODULES = {
    name: path
    for name, path in find_modules().items()
    if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
}


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )


# Imports the modules named in its arguments, one by one, and says which one loads what is unwanted.
IMPORT_EACH = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
    if loaded := set(sys.argv[1].split(",")) & set(sys.modules):
        sys.exit(f"importing {name} loads {loaded}")
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_nothing_heavy_and_not_the_other_side(package: str) -> None:
    names = [
        name
        for name in MODULES
        if name.partition(".")[0] == package and not f"{name}.".startswith(HEAVY_MODULES)
    ]
    done = run_python(IMPORT_EACH, ",".join(UNWANTED[package]), *names)
    assert done.returncode == 0, done.stderr


# Uses the batcher without a broker, and prints which of the modules in its argument are loaded.
USE_BATCHED = """
import sys
from batchery import Batcher, Failed, batched
assert batched(lambda items: items)(["a"]) == ["a"]
print(*set(sys.argv[1].split(",")) & set(sys.modules))
"""


def test_what_runs_without_a_broker_loads_no_celery_and_nothing_heavy() -> None:
    unwanted = {*HEAVY, "celery", "kombu", "redis", "pydantic", "batchery_producer"}
    done = run_python(USE_BATCHED, ",".join(unwanted))
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_copies_to_a_device_take_torch_and_no_transformers() -> None:
    done = run_python(IMPORT_EACH, "transformers", "batchery_worker.models.hardware.transfers")
    assert done.returncode == 0, done.stderr


# Imports the modules named in its arguments and prints what ours do meanwhile, besides importing.
WATCH_IMPORTS = """
import importlib, os, sys
folders = tuple(sys.argv[1].split(","))
watched = ("open", "os.", "shutil.", "socket.", "subprocess.", "tempfile.", "urllib.")
harmless = ("os.fork", "os.listdir", "os.scandir", "os.register_at_fork", "socket.__new__")

def say(frame, what):
    if frame and frame.f_code.co_filename.startswith(folders):
        print(f"{frame.f_code.co_filename}:{frame.f_lineno}: {what}")

def audit(event, arguments):
    "Blames the module that is being imported, be it ours or not, and not the import system."
    if event.startswith(watched) and event not in harmless:
        frame = sys._getframe(1)
        while frame and (code := frame.f_code).co_name != "<module>":
            frame = None if "importlib" in code.co_filename else frame.f_back
        say(frame, f"{event} {arguments!r}")

def read(what):
    "Blames who asks: libraries may look at variables of their own, as for the user's language."
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    say(frame, what)

class Environment(type(os.environ)):
    def __getitem__(self, key):
        read(f"reads environment variable {key}")
        return super().__getitem__(key)

    def __iter__(self):
        read("reads the environment")
        return super().__iter__()

os.environ.__class__ = Environment
sys.addaudithook(audit)
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_importing_a_module_of_ours_does_no_io_and_reads_no_environment() -> None:
    folders = ",".join(str(folder) for folder in PACKAGES.values())
    done = run_python(WATCH_IMPORTS, folders, *MODULES)
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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    ]


def test_only_settings_and_starters_of_processes_read_the_environment() -> None:
    readers = {name for name, path in MODULES.items() if environment_lines(path)}
    assert readers == set(ENVIRONMENT), "make it a setting, or bring ENVIRONMENT up to date"
