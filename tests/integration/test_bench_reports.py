"""What the benchmarks write beside their figures."""

import sys
from pathlib import Path

import pytest

from benchmarks.hardware import command, describe_lengths, hardware

ROOT = Path(__file__).resolve().parents[2]

#: Those that write a file.
WRITING = sorted(
    path
    for path in (ROOT / "benchmarks").rglob("*.py")
    if any(option in path.read_text() for option in ('"--json", type=Path', '"--write",'))
)


@pytest.mark.parametrize("path", WRITING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_of_figures_says_on_which_hardware(path: Path) -> None:
    text = path.read_text()
    assert any(words in text for words in ("hardware()", "about(", "import report\n"))
    assert {"machine", "cores", "memory_gib", "python"} == set(hardware())


def test_a_command_has_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--model", "/srv/models/chat", "--vllm-python=/opt/vllm/bin/python", "--seconds", "3"]
    given += ["--venvs", "/tmp/venvs", "--json", "benchmarks/results/some.json"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *given])
    assert command("some") == (
        "python -m benchmarks.some --model chat --vllm-python=python --seconds 3"
        " --json benchmarks/results/some.json"
    )


def test_lengths_are_described_by_their_middle_and_their_end() -> None:
    assert describe_lengths([5, 1, 3, 100]) == {
        "count": 4,
        "median": 4,
        "mean": 27.2,
        "longest": 100,
    }
