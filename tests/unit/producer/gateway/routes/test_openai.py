import asyncio
import base64
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from batchery_producer.gateway.answers import json_list
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.routes import openai


@pytest.mark.parametrize(
    ("form", "count", "is_long"),
    [("float", 10, False), ("float", 100, True), ("base64", 100, False)],
)
def test_answer_of_many_numbers_is_made_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, form: Any, count: int, is_long: bool
) -> None:
    numbers = np.arange(1000, dtype="<f4")
    vector = base64.b64encode(numbers.tobytes()).decode()
    threads: list[threading.Thread] = []

    async def embed_items(*_: Any) -> list[Any]:
        return [{"vector": vector, "tokens": 2}] * count

    def write(values: Any) -> bytes:
        threads.append(threading.current_thread())
        return json_list(values)

    model: Any = SimpleNamespace(name="embed", settings=SimpleNamespace(overflow="truncate"))
    models = SimpleNamespace(find=lambda *_: model)
    monkeypatch.setattr(openai, "get_gateway", lambda _: SimpleNamespace(models=models))
    monkeypatch.setattr(openai, "embed_items", embed_items)
    monkeypatch.setattr(openai, "json_list", write)
    caller = Caller("one", None, None, 100, 100, 100)
    request: Any = SimpleNamespace(state=SimpleNamespace(caller=caller))
    texts: Any = ["a"] * count
    body = openai.EmbeddingsRequest(input=texts, encoding_format=form)
    answer = orjson.loads(asyncio.run(openai.embeddings(request, body)).body)
    (thread,) = threads
    assert (thread is not threading.main_thread()) is is_long
    assert [each["index"] for each in answer["data"]] == list(range(count))
    assert answer["data"][-1]["embedding"] == (vector if form == "base64" else numbers.tolist())
    assert answer["usage"] == {"prompt_tokens": 2 * count, "total_tokens": 2 * count}
