"""The gateway's page takes a dropped picture or sound, and shows what the model says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from conftest import StartGateway, StartWorker
from support.browser import DESK, Browser
from support.gateway import GatewayProcess
from support.harness import Worker, wait_for
from support.pictures import draw, encode, save_vision_model
from support.sounds import make_recording, save_sound_model

KINDS = {
    "sort": ("image_classification", "vit-labels"),
    "find": ("object_detection", "detr"),
    "match": ("zero_shot_image_classification", "clip"),
    "hear": ("transcription", "whisper"),
}

#: Drops a file that the page has chosen already.
DROP = """
const dropped = new DataTransfer();
dropped.items.add(document.getElementById("file").files[0] ?? new File([""], "none"));
const event = new DragEvent("drop", { dataTransfer: dropped, bubbles: true, cancelable: true });
document.getElementById("item").dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, found = tmp_path_factory.mktemp("models"), dict[str, Any]()
    for name, (kind, architecture) in KINDS.items():
        save = save_sound_model if kind == "transcription" else save_vision_model
        save(folder / name, architecture)
        found[name] = {"kind": kind, "model": str(folder / name)}
    return found


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, models: dict[str, Any]) -> Worker:
    return start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, worker: Worker, models: dict[str, Any]) -> GatewayProcess:
    return start_gateway(models=models)


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Iterator[Browser]:
    browser.looks(DESK)
    with browser.visits(gateway.url):
        yield browser


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "cat.png").write_bytes(encode(draw(64, 48)))
    (folder / "call.wav").write_bytes(make_recording(2.0))
    (folder / "bad.png").write_bytes(b"no picture")
    return folder


def choose(page: Browser, model: str, file: Path) -> None:
    """Chooses a model, and a file, which runs at once."""
    Select(page.find_element(By.ID, "model")).select_by_value(model)
    page.find_element(By.ID, "file").send_keys(str(file))


def wait_shown(page: Browser, *texts: str) -> None:
    def shown() -> bool:
        return all(text in page.text("answer") for text in texts)

    wait_for(shown, f"the answer has {texts}")


def test_a_picture_is_labelled(page: Browser, files: Path) -> None:
    choose(page, "sort", files / "cat.png")
    wait_shown(page, "cat", "dog", "bird", " ms")


def test_labels_of_the_readers_own(page: Browser, files: Path) -> None:
    Select(page.find_element(By.ID, "model")).select_by_value("match")
    labels = page.find_element(By.ID, "more")
    labels.clear()
    labels.send_keys("a fish, two birds")
    page.find_element(By.ID, "file").send_keys(str(files / "cat.png"))
    wait_shown(page, "a fish", "two birds")


def test_objects_have_names_and_scores(page: Browser, files: Path) -> None:
    choose(page, "find", files / "cat.png")
    wait_shown(page, " ms")


def test_a_dropped_sound_is_written_down(
    page: Browser, files: Path, gateway: GatewayProcess
) -> None:
    choose(page, "hear", files / "call.wav")
    wait_shown(page, "call.wav", " ms")
    heard = page.find_element(By.CSS_SELECTOR, "#answer pre").text
    form = {"data": {"model": "hear"}, "files": {"file": (files / "call.wav").read_bytes()}}
    assert heard.split() == gateway.post("/v1/audio/transcriptions", **form).json()["text"].split()
    page.execute_script('document.getElementById("answer").replaceChildren()')
    assert page.execute_script(DROP)
    wait_shown(page, "call.wav", " ms")


def test_what_is_no_picture_says_so(page: Browser, files: Path) -> None:
    choose(page, "sort", files / "bad.png")
    wait_shown(page, "image: is no picture")
    # The browser tells its console of the status.
    assert len(page.complaints()) <= 1
