"""The engine `openai` in front of our own gateway: the texts of the model behind it, unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchery import Client
from batchery.settings import ModelSettings
from batchery_worker.models.openai_server.model import OpenAIServerModel
from conftest import StartGateway, StartWorker
from support.gateway import GatewayProcess
from support.patience import patient
from support.step_driver import StepDriver, find_errors
from support.tiny_writers import make_prompts, save_writer

TIMEOUT_S = patient(60)


@pytest.fixture(scope="module")
def gateway(
    start_module_worker: StartWorker,
    start_gateway: StartGateway,
    tmp_path_factory: pytest.TempPathFactory,
) -> GatewayProcess:
    """The gateway, with a worker behind it that serves a tiny model."""
    folder: Path = save_writer(tmp_path_factory.mktemp("writer"))
    chat = {"kind": "generation", "model": str(folder), "slots": 4, "cache_tokens": 1024}
    models = {"chat": chat}
    start_module_worker("batchery.app", "-Q", "chat", env={"BATCHERY_MODELS": json.dumps(models)})
    return start_gateway(models=models)


@pytest.fixture
def through(gateway: GatewayProcess) -> Any:
    """The engine, which asks the gateway."""
    settings = ModelSettings(
        kind="generation", engine="openai", model="chat", base_url=f"{gateway.url}/v1"
    )
    model = OpenAIServerModel(settings)
    model.load("cpu")
    yield StepDriver(model)
    model.unload()


ITEMS: list[Any] = [
    *make_prompts(12),
    *([{"role": "user", "content": prompt}] for prompt in make_prompts(4, seed=6)),
]

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"stop": ["e"]},
    {"temperature": 1.5, "top_p": 0.8, "seed": 2, "n": 2},
]


def words(result: Any) -> list[Any]:
    """What a result says, without its times."""
    return [(each["text"], each["finish_reason"]) for each in result.get("choices", [result])]


def test_texts_are_those_of_the_model_itself(through: StepDriver, redis_url: str) -> None:
    jobs = [(item, {"max_new_tokens": 12, **KINDS[at % 4]}) for at, item in enumerate(ITEMS)]
    with Client(redis_url) as client:
        chat = client.task("chat")
        sent = [chat.delay(item, **keywords) for item, keywords in jobs]
        direct = [each.get(timeout=TIMEOUT_S) for each in sent]
    for is_streamed in (True, False):
        through.model.is_streamed = is_streamed
        slots = [through.join(item, **keywords) for item, keywords in jobs]
        results = through.wait(*slots, timeout_s=TIMEOUT_S)
        assert not find_errors(results)
        assert list(map(words, results)) == list(map(words, direct))
        for each in ("tokens_in", "tokens_out"):
            assert [result[each] for result in results] == [result[each] for result in direct]
        for slot, (_, keywords), result in zip(slots, jobs, results, strict=True):
            if is_streamed and "n" not in keywords:
                assert through.text(slot) == result["text"]
