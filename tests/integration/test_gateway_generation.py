"""Text generation over HTTP: clients of OpenAI and TGI, unmodified, in front of a real worker."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker
from support.served_models import save_writer

Models = dict[str, dict[str, Any]]

MESSAGES: Any = [{"role": "user", "content": "the cat sat on the mat"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model that chats, one that has no template, and one that no worker serves."""
    folder: Path = tmp_path_factory.mktemp("models")
    chat = {**save_writer(folder / "chat"), "aliases": ["gpt-4o-mini"]}
    bare = {**save_writer(folder / "bare", has_template=False), "max_new_tokens": 5}
    return {"chat": chat, "bare": bare, "away": chat | {"aliases": []}, "embed": EMBED["embed"]}


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, models: Models) -> Worker:
    served = {name: models[name] for name in ("chat", "bare")}
    return start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(served)})


@pytest.fixture(scope="module")
def gateway(
    models: Models,
    worker: Worker,
    start_gateway: StartGateway,
    tmp_path_factory: pytest.TempPathFactory,
) -> GatewayProcess:
    options = {"files": str(tmp_path_factory.mktemp("files")), "worker_grace_s": 5}
    return start_gateway(models=models, gateway=options)


@pytest.fixture
def api(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, as it comes."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_is_answered(api: openai.OpenAI) -> None:
    asked: Any = {"model": "gpt-4o-mini", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    answer = api.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.prompt_tokens > 6
    again = api.chat.completions.create(**asked)
    assert again.choices[0].message.content == choice.message.content
    assert again.id != answer.id
