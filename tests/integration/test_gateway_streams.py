"""Streams that pause: what OpenAI's client, as it comes, makes of the silence."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from batchery_producer.gateway import answers
from batchery_producer.gateway.answers import EventStream, write_event
from conftest import StartGateway, StartWorker
from support.patience import patient
from support.served_models import save_writer


async def pausing(scope: Any, receive: Any, send: Any) -> None:
    """A chat whose pieces have ids, as ours, with a silence behind each."""

    async def events() -> AsyncIterator[bytes]:
        for number in range(3):
            delta = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}
            head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            yield write_event({**head, "choices": [delta]}, f"a/{number}-0")
            await asyncio.sleep(10 * answers.PING_S)
        yield b"data: [DONE]\n\n"

    await EventStream(events(), lambda: None)(scope, receive, send)


def test_silence_is_no_event_to_openai_s_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PING_S", 0.02)
    server = uvicorn.Server(uvicorn.Config(pausing, lifespan="off", log_config=None))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
                asked: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
                events = list(api.chat.completions.create(**asked, stream=True))
        finally:
            server.should_exit = True
            thread.join()
    assert [event.choices[0].delta.content for event in events] == ["0 ", "1 ", "2 "]


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
