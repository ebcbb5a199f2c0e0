"""The examples of pictures and sound, run as their readers run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import StartWorker
from support.harness import TESTS, Worker
from support.patience import patient
from support.pictures import draw, encode, save_vision_model
from support.sounds import make_recording, save_sound_model

EXAMPLES = TESTS.parent / "examples" / "media"


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    folder = tmp_path_factory.mktemp("models")
    save_vision_model(folder / "look", "clip")
    save_sound_model(folder / "hear", "whisper")
    models = {
        "look": {"kind": "image_embedding", "model": str(folder / "look")},
        "hear": {"kind": "transcription", "model": str(folder / "hear")},
    }
    # On a busy machine, readers take long to start.
    media = {"timeout_s": patient(60)}
    env = {"BATCHERY_MODELS": json.dumps(models), "BATCHERY_MEDIA": json.dumps(media)}
    return start_module_worker("batchery.app", env=env)


def run(redis_url: str, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *arguments],
        env={**os.environ, "BATCHERY_REDIS_URL": redis_url, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_is_written_down_and_only_what_is_new(
    tmp_path: Path, redis_url: str, worker: Worker
) -> None:
    calls = {"a.wav": make_recording(4.0), "b/c.wav": make_recording(7.0, 1), "bad.mp3": b"none"}
    (tmp_path / "b").mkdir()
    for name, data in calls.items():
        (tmp_path / name).write_bytes(data)
    done = run(redis_url, "transcribe_folder.py", str(tmp_path))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        1,
        [f"{tmp_path}/a.wav", f"{tmp_path}/b/c.wav"],
    )
    # Beside what a client logs while a slow worker loads.
    (problem,) = [each for each in done.stderr.splitlines() if each.startswith(str(tmp_path))]
    assert problem.startswith(f"{tmp_path}/bad.mp3: audio: ")
    assert (tmp_path / "a.txt").read_text().strip()
    assert re.match(r"1\n00:00:0\d,\d{3} --> ", (tmp_path / "b" / "c.srt").read_text())
    (tmp_path / "bad.mp3").unlink()
    done = run(redis_url, "transcribe_folder.py", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pictures_are_found_by_a_text(tmp_path: Path, redis_url: str, worker: Worker) -> None:
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(encode(draw(50, 40, seed=number)))
    (tmp_path / "bad.jpg").write_bytes(b"none")

    def find(text: str) -> Any:
        done = run(redis_url, "find_pictures.py", str(tmp_path), text)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^bad\.jpg: image: .*$", done.stderr, re.MULTILINE)
        return [line.split() for line in done.stdout.splitlines()]

    first = find("the cat sat on the mat")
    scores = [float(score) for score, _ in first]
    assert len(first) == 5
    assert scores == sorted(scores, reverse=True)
    # The vectors of pictures are there now.
    assert find("the cat sat on the mat") == first
    assert (tmp_path / "vectors.npz").exists()
