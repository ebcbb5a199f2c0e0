"""Text generation over HTTP: clients of OpenAI, unmodified, in front of a real worker."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from celery import Celery

from batchery_producer.gateway.callers import make_key
from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker, wait_for
from support.patience import patient
from support.served_models import save_writer

Models = dict[str, dict[str, Any]]

#: Routes that stream texts.
PATHS = ("/v1/chat/completions", "/v1/completions")

MESSAGES: Any = [{"role": "user", "content": "the cat sat on the mat"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model that chats, one without a template, one that no worker serves, and another kind."""
    folder: Path = tmp_path_factory.mktemp("models")
    chat = {**save_writer(folder / "chat"), "aliases": ["gpt-4o-mini"]}
    bare = {**save_writer(folder / "bare", has_template=False), "max_new_tokens": 5}
    return {"chat": chat, "bare": bare, "away": chat | {"aliases": []}, "embed": EMBED["embed"]}


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, models: Models) -> Worker:
    served = {name: models[name] for name in ("chat", "bare")}
    env = {
        "BATCHERY_MODELS": json.dumps(served),
        "BATCHERY_STREAM_GRACE_S": str(patient(5)),
        "BATCHERY_SHED_LATE": "true",
    }
    return start_module_worker("batchery.app", env=env)


@pytest.fixture(scope="module")
def gateway(models: Models, worker: Worker, start_gateway: StartGateway) -> GatewayProcess:
    return start_gateway(models=models, gateway={"worker": True})


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


def stream(api: openai.OpenAI, **fields: Any) -> list[Any]:
    """All events of a chat."""
    asked = {"model": "chat", "messages": MESSAGES, "temperature": 0, "max_tokens": 8, **fields}
    return list(api.chat.completions.create(stream=True, **asked))


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_streamed_chat_is_the_whole_one_in_pieces(api: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = api.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    events = stream(api, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2)
    assert text_of(events) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])
    assert len({event.id for event in events}) == 1
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content
    parts = [event.choices[0].logprobs for event in events[:-1]]
    told = [token for part in parts if part for token in part.content]
    # Its neighbours in a step change the last digits.
    pairs = list(zip(told, content, strict=False))
    assert [one.token for one, _ in pairs] == [other.token for _, other in pairs]
    assert [one.logprob for one, _ in pairs] == pytest.approx(
        [other.logprob for _, other in pairs], abs=1e-4
    )
    assert len(told) >= 7
    for token in content:
        assert token.logprob == max(each.logprob for each in token.top_logprobs)


def test_several_texts_and_seeds(api: openai.OpenAI) -> None:
    events = stream(api, n=2, seed=3, temperature=1.5)
    texts = [text_of(events, 0), text_of(events, 1)]
    assert texts[0] != texts[1]
    choices = [choice for event in events for choice in event.choices]
    ends = [(each.index, each.finish_reason) for each in choices if each.finish_reason]
    assert sorted(ends) == [(0, "length"), (1, "length")]
    whole: Any = api.chat.completions.create(
        model="chat", messages=MESSAGES, n=2, seed=3, temperature=1.5, max_tokens=8
    )
    assert [choice.message.content for choice in whole.choices] == texts
    # OpenAI's default temperature draws.
    drawn = {text_of(stream(api, temperature=None, seed=seed)) for seed in range(4)}
    assert len(drawn) > 1


def test_text_goes_on(api: openai.OpenAI) -> None:
    asked: Any = {"model": "bare", "prompt": "the cat", "temperature": 0}
    whole = api.completions.create(**asked, logprobs=2)
    assert whole.usage is not None
    # The model's setting.
    assert whole.usage.completion_tokens == 5
    text = whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert len(logprobs.tokens) == len(logprobs.top_logprobs or ()) == 5
    events = list(api.completions.create(**asked, stream=True))
    assert "".join(event.choices[0].text for event in events) == text
    assert events[-1].choices[0].finish_reason == "length"
    several = api.completions.create(**{**asked, "prompt": ["the cat", "a dog"]}, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == text
    assert api.completions.create(**asked, best_of=1).choices[0].text == text
    word = text.split()[2]
    stopped = api.completions.create(**asked, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert word not in stopped.choices[0].text
    ids = api.completions.create(**{**asked, "prompt": [[5, 6]]})
    assert ids.choices[0].text


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages[0].role"),
        ({"temperature": 3}, 400, "temperature"),
        ({"max_tokens": 5000}, 400, "messages"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"model": "bare"}, 400, "messages"),
        ({"model": "embed"}, 404, "model"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_bad_request_says_what_is_wrong_before_a_stream_begins(
    gateway: GatewayProcess, fields: dict[str, Any], status: int, param: str, *, is_stream: bool
) -> None:
    body = {"model": "chat", "messages": MESSAGES, "max_tokens": 5, "stream": is_stream, **fields}
    answer = gateway.post("/v1/chat/completions", body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    is_too_long = fields.get("max_tokens") == 5000
    assert (error["code"] == "context_length_exceeded") is is_too_long


# Streams that are cut off


LONG: dict[str, Any] = {
    "model": "chat",
    "messages": MESSAGES,
    "stream": True,
    "temperature": 0,
    "max_tokens": 3000,
    "ignore_eos": True,
}


def read_events(lines: Iterator[str], count: int | None = None) -> list[tuple[str, Any]]:
    """The next events that have an id, with their id; all of them if there is no count."""
    found: list[tuple[str, Any]] = []
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name:
            fields[name] = value
            continue
        if fields.get("data", "[DONE]") != "[DONE]":
            assert "error" not in fields["data"], fields
            if "id" in fields:
                found.append((fields["id"], json.loads(fields["data"])))
        fields = {}
        if len(found) == count:
            break
    return found


def joined(events: list[tuple[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for _, event in events)


def test_time_limit_of_a_stream_is_that_of_each_piece(gateway: GatewayProcess) -> None:
    timeout_s = patient(3)
    body = {**LONG, "max_tokens": 4000, "n": 16, "logprobs": True, "top_logprobs": 20}
    headers = {"X-Request-Timeout": str(timeout_s)}
    with gateway.stream("/v1/chat/completions", body, headers=headers) as answer:
        lines = answer.iter_lines()
        # More than a worker counts as the deadline.
        end_s = time.monotonic() + 1.5 * timeout_s
        while time.monotonic() < end_s:
            ((_, event),) = read_events(lines, 1)
        # Else it would write on for the grace time.
        gateway.request("DELETE", f"/v1/chat/completions/{event['id']}").raise_for_status()


def test_caller_who_was_cut_off_reads_on(gateway: GatewayProcess) -> None:
    body = {**LONG, "max_tokens": 400}
    with gateway.stream("/v1/chat/completions", body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        begun = read_events(answer.iter_lines(), 20)
    last_id, last = begun[-1]
    headers = {"Last-Event-ID": last_id}
    with gateway.stream("/v1/chat/completions", body, headers=headers) as answer:
        assert answer.status_code == 200
        rest = read_events(answer.iter_lines())
    assert rest[0][1]["id"] == last["id"]
    ids = [id_ for id_, _ in begun + rest]
    assert len(set(ids)) == len(ids)
    whole = gateway.post("/v1/chat/completions", {**body, "stream": False}).json()
    assert joined(begun) + joined(rest) == whole["choices"][0]["message"]["content"]
    # At its end, too.
    headers = {"Last-Event-ID": rest[-1][0]}
    with gateway.stream("/v1/chat/completions", body, headers=headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[0][6:])["choices"][0]["finish_reason"] == "length"
    assert lines[-1] == "data: [DONE]"
    answer = gateway.post("/v1/chat/completions", body, headers={"Last-Event-ID": "17"})
    assert answer.status_code == 400
    assert "Last-Event-ID is '17'" in answer.json()["error"]["message"]
    unknown = {"Last-Event-ID": "11111111-1111-1111-1111-111111111111/1-0"}
    answer = gateway.post("/v1/chat/completions", body, headers=unknown)
    assert answer.status_code == 404
    assert "no stream of yours has this id" in answer.json()["error"]["message"]


def test_stream_is_ended_at_once_by_its_id(
    gateway: GatewayProcess, client: Celery, api: openai.OpenAI
) -> None:
    fields = {name: value for name, value in LONG.items() if name != "ignore_eos"}
    fields["extra_body"] = {"ignore_eos": True}
    with api.chat.completions.create(**fields) as events:
        job = next(iter(events)).id
        assert api.chat.completions.delete(job).deleted
        with pytest.raises(openai.APIError):
            list(events)
    state: Any = client.AsyncResult(job.removeprefix("chatcmpl-"))
    wait_for(lambda: state.state == "REVOKED", "revoked")
    assert gateway.request("DELETE", "/v1/chat/completions/nobody").status_code == 404


@pytest.mark.parametrize("end", ["read", "deleted", "left"])
def test_stream_leaves_nothing_for_long(
    gateway: GatewayProcess, client: Celery, store: Any, end: str
) -> None:
    # A quiet machine writes one text of so many tokens, and not all of sixteen, in the grace time.
    body = {**LONG, "max_tokens": 100 if end == "read" else 4000, "n": 1 if end == "read" else 16}
    with gateway.stream("/v1/chat/completions", body) as answer:
        lines = answer.iter_lines()
        ((_, event),) = read_events(lines, 1)
        if end == "deleted":
            gateway.request("DELETE", f"/v1/chat/completions/{event['id']}").raise_for_status()
        elif end == "read":
            read_events(lines)
    job = event["id"].removeprefix("chatcmpl-")
    result: Any = client.AsyncResult(job)
    if end == "left":
        # Its slot is freed after the grace time.
        assert result.state == "PENDING"
    state = "SUCCESS" if end == "read" else "REVOKED"
    wait_for(lambda: result.state == state, "it has ended", patient(60))

    def kept_s() -> dict[bytes, int]:
        """How long each key of pieces and result stays."""
        keys = [key for key in store.keys(f"*{job}") if b"batchery:http" not in key]
        return {key: store.ttl(key) for key in keys}

    # The request's time, and two minutes.
    wait_for(lambda: all(0 < each <= 180 for each in kept_s().values()), f"{kept_s()}")


@pytest.mark.usefixtures("worker")
def test_stream_of_another_key_is_unknown(models: Models, start_gateway: StartGateway) -> None:
    keys = {name: make_key() for name in ("acme", "bolt")}
    settings: Models = {name: {"hash": hashed} for name, (_, hashed) in keys.items()}
    # One more than at once: that a caller has hung up is noticed a moment later.
    settings["acme"]["max_concurrency"] = 3
    keyed = start_gateway(models=models, gateway={"keys": settings, "tasks": ["chat"]})

    def call(name: str, method: str, path: str, body: Any = None, after: str = "") -> Any:
        headers = {"Authorization": f"Bearer {keys[name][0]}", "Last-Event-ID": after}
        return keyed.request(method, path, json=body, headers=headers)

    def refusals(name: str, job: str) -> set[tuple[int, str]]:
        """What is told of an id, wherever it may be asked for."""
        texts = {"prompt": "a", **LONG, "max_tokens": 1}
        answers = [
            *(call(name, "POST", path, texts, after=f"{job}/1-0") for path in PATHS),
            call(name, "DELETE", f"/v1/chat/completions/chatcmpl-{job}"),
        ]
        return {(each.status_code, each.text.replace(job, "ID")) for each in answers}

    acme = {"Authorization": f"Bearer {keys['acme'][0]}"}
    with keyed.stream("/v1/chat/completions", LONG, headers=acme) as answer:
        lines = answer.iter_lines()
        last_id, event = read_events(lines, 1)[0]
        job = event["id"].removeprefix("chatcmpl-")
        unknown = refusals("bolt", "11111111-1111-4111-8111-111111111111")
        assert {status for status, _ in unknown} == {404}
        assert refusals("bolt", job) == unknown
        # On the route, and by the model, that began it.
        body = {**LONG, "prompt": "a"}
        assert call("acme", "POST", "/v1/completions", body, after=last_id).status_code == 404
        other = {**LONG, "model": "bare", "messages": None, "prompt": "a"}
        assert call("acme", "POST", "/v1/completions", other, after=last_id).status_code == 404
        # Nobody has ended it.
        assert read_events(lines, 1)
    with keyed.stream(
        "/v1/chat/completions", LONG, headers={**acme, "Last-Event-ID": last_id}
    ) as answer:
        assert read_events(answer.iter_lines(), 1)
        assert call("acme", "DELETE", f"/v1/chat/completions/{event['id']}").status_code == 200
    # A task is no stream, even to its own key.
    sent = call("acme", "POST", "/tasks/chat", {"item": {"prompt": "a"}, "wait_s": 0})
    assert sent.status_code == 202, sent.text
    for name in keys:
        assert refusals(name, sent.json()["id"]) == unknown


@pytest.mark.usefixtures("worker")
def test_stream_that_is_refused_leaves_nothing_in_redis(
    models: Models, start_gateway: StartGateway, store: Any
) -> None:
    limited = {"normal": {"level": 0, "share": 1, "max_waiting": 1}}
    full = start_gateway(models=models, environment={"BATCHERY_CLASSES": json.dumps(limited)})
    names = ("batchery-pieces", "batchery-woken", "batchery-reader", "batchery:http:stream")

    def found() -> set[bytes]:
        return {key for name in names for key in store.keys(f"{name}:*")}

    before = found()
    store.lpush("away", b"{}")
    answer = full.post("/v1/chat/completions", {**LONG, "model": "away"})
    assert answer.status_code == 429, answer.text
    wait_for(lambda: found() <= before, "no keys are left")
    store.delete("away")


@pytest.mark.usefixtures("worker")
def test_limits_of_a_key_hold(models: Models, start_gateway: StartGateway) -> None:
    key, hashed = make_key()
    limits = {"hash": hashed, "max_items": 2, "max_chars": 500}
    keyed = start_gateway(models=models, gateway={"keys": {"shop": limits}})
    long = [{"role": "user", "content": "a " * 300}]
    for fields, status in (({}, 200), ({"n": 3}, 413), ({"messages": long}, 413)):
        body = {"model": "chat", "messages": MESSAGES, "max_tokens": 2, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        assert keyed.post("/v1/chat/completions", body, headers=headers).status_code == status


def run_batch(api: openai.OpenAI, rows: list[dict[str, Any]]) -> Any:
    """A batch of chats that is over."""
    content = "\n".join(map(json.dumps, rows)).encode()
    file = api.files.create(file=("chats.jsonl", content), purpose="batch")
    batch = api.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_for(
        lambda: api.batches.retrieve(batch.id).status in ("completed", "failed"),
        "over",
        patient(60),
    )
    return api.batches.retrieve(batch.id)


def test_batch_file_of_chats(api: openai.OpenAI) -> None:
    rows: list[dict[str, Any]] = [
        {
            "custom_id": f"r{temperature}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "gpt-4o-mini",
                "messages": MESSAGES,
                "temperature": temperature,
                "max_tokens": 6,
                "n": 2,
                "seed": 1,
            },
        }
        for temperature in (0, 1.5)
    ]
    wrong = {**rows[0], "custom_id": "wrong", "body": {**rows[0]["body"], "stream": True}}
    ended = run_batch(api, [*rows, wrong])
    assert ended.status == "completed"
    assert ended.usage is not None
    assert ended.usage.output_tokens == 24
    assert ended.output_file_id is not None
    assert ended.error_file_id is not None
    lines = map(json.loads, api.files.content(ended.output_file_id).text.splitlines())
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines}
    whole = api.chat.completions.create(**rows[0]["body"])
    texts = [choice.message.content for choice in whole.choices]
    assert [each["message"]["content"] for each in bodies["r0"]["choices"]] == texts
    assert bodies["r1.5"]["object"] == "chat.completion"
    assert bodies["r1.5"]["usage"]["completion_tokens"] == 12
    (failed,) = map(json.loads, api.files.content(ended.error_file_id).text.splitlines())
    assert "stream: batch files have" in failed["response"]["body"]["error"]["message"]
