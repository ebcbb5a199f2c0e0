"""The page's box for models that write, in a real Chromium: it types along, and can be stopped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartGateway, StartWorker
from support.browser import Browser
from support.gateway import GatewayProcess
from support.harness import wait_for
from support.patience import patient
from support.served_models import TEMPLATE
from support.tiny_models import save_model

#: How long its texts are: no token ends one.
TOKENS = 15_000


@pytest.fixture(scope="module")
def gateway(
    start_module_worker: StartWorker,
    start_gateway: StartGateway,
    tmp_path_factory: pytest.TempPathFactory,
) -> GatewayProcess:
    """One that serves a chat, and a model that only goes on with texts."""
    folder: Path = tmp_path_factory.mktemp("models")
    models: dict[str, dict[str, Any]] = {}
    for name in ("chat", "bare"):
        size: dict[str, Any] = {"max_position_embeddings": 16_384, "eos_token_id": 100_000}
        save_model(folder / name, "llama", head="CausalLM", **size)
        limits = {"slots": 2, "cache_tokens": 16_384, "max_new_tokens": TOKENS}
        models[name] = {"kind": "generation", "model": str(folder / name), **limits}
    models["bare"]["max_new_tokens"] = 5
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})
    return start_gateway(models=models)


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Iterator[Browser]:
    with browser.visits(gateway.url):
        yield browser


def choose(page: Browser, model: str, text: str) -> None:
    page.find_element("id", "model").send_keys(model)
    page.type("item", text)
    page.click("run")


def written(page: Browser) -> str:
    """The text, without the line above it."""
    return page.text("answer").partition("\n")[2]


def test_answer_grows_until_it_is_stopped(page: Browser) -> None:
    choose(page, "chat", "the cat sat on the mat")
    shown = [""]
    while len(shown) < 4:
        wait_for(lambda: written(page) != shown[-1], "more of it")
        shown.append(written(page))
        assert shown[-1].startswith(shown[-2])
    assert page.text("run") == "Stop"
    page.click("run")
    wait_for(lambda: "Stopped." in page.text("answer"), "the page has stopped")
    assert page.text("run") == "Run"
    # What it has written stays to be read.
    assert written(page).startswith(shown[-1])


def test_text_without_a_template_is_written_to_its_end(page: Browser) -> None:
    choose(page, "bare", "the cat")
    wait_for(lambda: "tokens/s" in page.text("answer"), "its end", patient(60))
    assert page.text("answer").startswith("5 tokens, ")
    assert page.text("run") == "Run"
