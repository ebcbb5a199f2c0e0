import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.routes import completions
from batchery_producer.openai_generation import (
    CHAT_URL,
    TEXT_URL,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    build_completion,
)


@pytest.mark.parametrize(("count", "is_long"), [(10, False), (2000, True)])
@pytest.mark.parametrize("url", [CHAT_URL, TEXT_URL])
def test_answer_with_many_logarithms_is_made_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, url: str, count: int, is_long: bool
) -> None:
    token = {"id": 7, "token": "a", "logprob": -1.0, "top": [["a", 7, -1.0]] * 20}
    text = {"text": "a" * count, "finish_reason": "length", "logprobs": [token] * count}
    result = {**text, "tokens_in": 1, "tokens_out": count}
    threads: list[threading.Thread] = []

    async def generate(*_: Any) -> list[Any]:
        return [result]

    def build(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return build_completion(*given)

    monkeypatch.setattr(completions, "generate", generate)
    monkeypatch.setattr(completions, "build_completion", build)
    caller = Caller("one", None, None, 100, 100, 100)
    request: Any = SimpleNamespace(state=SimpleNamespace(caller=caller))
    chat = ChatRequest(messages=[ChatMessage(role="user", content="a")])
    body = chat if url == CHAT_URL else CompletionRequest(prompt="a")
    model: Any = SimpleNamespace(name="chat")
    answer = asyncio.run(completions._complete(request, model, body, url))
    assert orjson.loads(answer.body)["usage"]["completion_tokens"] == count
    (thread,) = threads
    assert (thread is not threading.main_thread()) is is_long
