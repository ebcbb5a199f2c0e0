"""The server of the engine `vllm` as it starts, with programs in its place: no vLLM is needed."""

import stat
from pathlib import Path
from typing import Any

import pytest

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.openai_server.vllm_server import VllmModel, make_environment
from support.tiny_models import save_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, "llama")
    return folder


def refusal(model: Path, **settings: Any) -> str:
    """The one line of the error that a load ends with."""
    chosen = {"kind": "generation", "engine": "vllm", "model": str(model), **settings}
    with pytest.raises(ModelLoadError) as caught:
        VllmModel(ModelSettings.model_validate(chosen)).load("cuda:3")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def program(folder: Path, *lines: str) -> str:
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(stat.S_IRWXU)
    return str(path)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [
                'echo "(EngineCore pid=7) ERROR 11-25 19:30:13 [core.py:15] Traceback"',
                'echo "(EngineCore pid=7) ERROR 11-25 19:30:13 [core.py:15] ValueError: no room"',
                'echo "RuntimeError: Engine core initialization failed. See root cause above."',
                "exit 1",
            ],
            "does not start: ValueError: no room",
        ),
        (["exit 3"], "does not start: it said nothing"),
    ],
)
def test_the_reason_is_the_error_of_the_log(
    lines: list[str], cause: str, llama: Path, tmp_path: Path
) -> None:
    assert refusal(llama, engine_python=program(tmp_path, *lines)).endswith(cause)


def test_the_server_gets_its_options_its_gpu_and_nothing_that_leads_to_our_packages(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    python = program(
        tmp_path,
        "told=$CUDA_VISIBLE_DEVICES,$VLLM_NO_USAGE_STATS",
        'echo "OddError: $* [$PYTHONPATH] $PYTHONSAFEPATH $told"',
    )
    options = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "compilation_config": {"a": 1},
    }
    told = refusal(llama, engine_python=python, slots=5, max_length=64, engine_options=options)
    wanted = ["serve", str(llama), "--max-num-seqs=5", "--max-model-len=64", "--enforce-eager"]
    wanted += ["--load-format=safetensors", "--no-enable-prefix-caching", '={"a": 1}']
    assert all(each in told for each in wanted), told
    assert told.endswith("[] 1 3,0")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "engine_python = None: there is no such program"),
        ({"engine_python": "/nowhere/bin/python"}, "'/nowhere/bin/python': there is no such"),
        ({"cache_tokens": 128}, "cache_tokens is not for the engine vllm; set engine_options.kv"),
        ({"model": "no/such/folder"}, "there is no such folder"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    settings: dict[str, Any], problem: str, llama: Path, tmp_path: Path
) -> None:
    python = {} if problem.startswith("engine_python") else {"engine_python": "/bin/sh"}
    assert problem in refusal(Path(settings.pop("model", llama)), **{**python, **settings})


@pytest.mark.parametrize(
    ("device", "options", "there", "visible"),
    [
        ("cpu", {}, "4", "4"),
        ("cuda:1", {}, "", "1"),
        ("cuda:1", {}, "4,7", "7"),
        ("cuda", {}, "GPU-a,GPU-b", "GPU-a"),
        ("cuda:1", {"tensor_parallel_size": 2}, "4,7", "4,7"),
    ],
)
def test_the_server_of_a_device_sees_its_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    options: dict[str, int],
    there: str,
    visible: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there)
    assert make_environment(device, options)["CUDA_VISIBLE_DEVICES"] == visible
