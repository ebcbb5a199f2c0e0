"""The process of the engine `vllm`, with programs in its place: no vLLM is needed."""

from pathlib import Path
from typing import Any

import pytest

from batchery.errors import ModelLoadError
from batchery_worker.models.generation.vllm_process import VllmProcess, visible_gpus

SETUP: dict[str, Any] = {"options": {}, "cache_tokens": None}


def program(folder: Path, *lines: str) -> str:
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return str(path)


def test_reason_is_the_error_in_the_log_and_not_the_line_that_points_to_it(tmp_path: Path) -> None:
    python = program(
        tmp_path,
        'echo "(EngineCore pid=7) ERROR 11-25 19:30:13 [core.py:15] Traceback"',
        'echo "(EngineCore pid=7) ERROR 11-25 19:30:13 [core.py:15] ValueError: no room for it"',
        'echo "RuntimeError: Engine core initialization failed. See root cause above."',
        "exit 1",
    )
    with pytest.raises(ModelLoadError, match=r"does not start: ValueError: no room for it$"):
        VllmProcess(python, SETUP, None)


def test_program_that_says_nothing_is_named(tmp_path: Path) -> None:
    python = program(tmp_path, "exit 3")
    with pytest.raises(ModelLoadError, match=r"python.*does not start: it said nothing"):
        VllmProcess(python, SETUP, None)


def test_nothing_of_our_environment_leads_its_python_to_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    python = program(
        tmp_path,
        'echo "OddError: [$PYTHONPATH] $PYTHONSAFEPATH $CUDA_VISIBLE_DEVICES $VLLM_NO_USAGE_STATS"',
    )
    with pytest.raises(ModelLoadError, match=r"OddError: \[\] 1 3 0"):
        VllmProcess(python, SETUP, "3")


@pytest.mark.parametrize(
    ("device", "options", "there", "visible"),
    [
        ("cpu", {}, "", None),
        ("cuda:1", {}, "", "1"),
        ("cuda:1", {}, "4,7", "7"),
        ("cuda", {}, "GPU-a,GPU-b", "GPU-a"),
        ("cuda:1", {"tensor_parallel_size": 2}, "4,7", None),
    ],
)
def test_engine_of_a_device_sees_its_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    options: dict[str, int],
    there: str,
    visible: str | None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there)
    assert visible_gpus(device, options) == visible
