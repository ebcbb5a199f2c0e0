"""Streams that pause: what OpenAI's client, as it comes, makes of the silence."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from conftest import StartGateway, StartWorker
from support.patience import patient
from support.served_models import save_writer


def test_stream_goes_on_when_a_killed_worker_comes_back(
    start_worker: StartWorker, start_gateway: StartGateway, tmp_path: Path
) -> None:
    models = {"chat": save_writer(tmp_path / "chat")}
    env = {"BATCHERY_MODELS": json.dumps(models)}
    gateway = start_gateway(models=models)
    hasty = start_gateway(models=models, gateway={"stream_timeout_s": patient(5)})
    worker = start_worker("batchery.app", env=env)
    asked: Any = {
        "model": "chat",
        "messages": [{"role": "user", "content": "the cat sat on the mat"}],
        "temperature": 0,
        "max_tokens": 1500,
        "extra_body": {"ignore_eos": True},
    }
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": patient(120)}
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", **options) as api,
        openai.OpenAI(base_url=f"{hasty.url}/v1", **options) as impatient,
    ):
        stream = api.chat.completions.create(**asked, stream=True)
        other = impatient.chat.completions.create(**asked, stream=True)
        parts = [next(stream).choices[0].delta.content or "" for _ in range(20)]
        next(iter(other))
        worker.kill()
        with pytest.raises(openai.APIError, match="nothing new of the text within"):
            list(other)
        start_worker("batchery.app", env=env)
        parts += [event.choices[0].delta.content or "" for event in stream]
        whole = api.chat.completions.create(**asked)
    assert "".join(parts) == whole.choices[0].message.content
