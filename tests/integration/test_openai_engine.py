"""The engine `openai` against a real server that misbehaves."""

import asyncio
import base64
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from batchery import Advance, Client, Generation
from batchery.errors import (
    InvalidItem,
    ModelLoadError,
    PromptTooLong,
    ServerBusy,
    ServerFailed,
    ServerRefused,
    SettingsError,
)
from batchery.settings import ModelSettings
from batchery_worker.models.openai_server.model import OpenAIServerModel
from conftest import StartGateway, StartWorker
from support.harness import Worker, wait_for
from support.openai_server import (
    Call,
    Cut,
    OpenAIServer,
    cut_after,
    echo,
    pause_after,
    raw,
    status,
)
from support.patience import patient
from support.step_driver import StepDriver, find_errors

Start = Callable[..., StepDriver]


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as made:
        yield made


@pytest.fixture
def start(server: OpenAIServer) -> Iterator[Start]:
    """Loads models that ask the server."""
    models: list[OpenAIServerModel] = []

    def load(**settings: Any) -> StepDriver:
        fields = {"base_url": server.url, "server_retry_s": patient(10), **settings}
        model = OpenAIServerModel(
            ModelSettings(kind="generation", engine="openai", model="tiny", **fields)
        )
        model.load("cpu")
        models.append(model)
        return StepDriver(model)

    yield load
    for model in models:
        model.unload()


@pytest.fixture
def driver(start: Start) -> StepDriver:
    return start()


def test_prompt_and_chat_go_to_their_routes_with_keywords_by_openais_names(
    server: OpenAIServer, driver: StepDriver
) -> None:
    result = driver.run("one two", max_new_tokens=7, stop=["x"], seed=3, top_k=5)
    assert result["text"] == "ONE TWO "
    assert result["finish_reason"] == "stop"
    assert (result["tokens_in"], result["tokens_out"]) == (3, 2)
    assert 0 < result["timings"]["first_token_ms"] <= result["timings"]["total_ms"]
    assert driver.text(0) == "ONE TWO "

    messages = [{"role": "user", "content": "hello"}]
    schema = {"type": "json_object"}
    chat = {"messages": messages, "options": {"temperature": 0.5, "n": 2}}
    extra = {"min_p": 0.1, "max_tokens": None}
    result = driver.run(chat, temperature=1.0, response_format=schema, extra_body=extra)
    assert [each["text"] for each in result["choices"]] == ["HELLO ", "HELLO "]
    pieces = [(piece["choice"], piece.get("finish_reason")) for piece in driver.pieces[1]]
    assert pieces == [(0, None), (0, "stop"), (1, None), (1, "stop")]

    first, second = server.asked
    shared = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    assert first.path == "/v1/completions"
    assert first.body == {
        **shared,
        "prompt": "one two",
        "max_tokens": 7,
        "temperature": 0,
        "stop": ["x"],
        "seed": 3,
        "top_k": 5,
    }
    assert second.path == "/v1/chat/completions"
    assert second.body == {
        **shared,
        "messages": messages,
        "temperature": 0.5,
        "n": 2,
        "response_format": schema,
        "min_p": 0.1,
    }


def test_tool_calls_and_log_probabilities_come_in_the_result(
    server: OpenAIServer, driver: StepDriver
) -> None:
    def delta(delta: Any, **others: Any) -> Any:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **others}]}

    def call(**function: str) -> Any:
        return {"tool_calls": [{"index": 0, "function": function}]}

    first = call(name="add", arguments="")
    first["tool_calls"][0] |= {"id": "call_1", "type": "function"}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    server.replies["add"] = [
        raw(
            delta({"role": "assistant", "content": None}),
            delta({"reasoning_content": "Hm"}),
            delta({"reasoning_content": "m."}),
            *(delta(first), delta(call(arguments='{"a":')), delta(call(arguments="1}"))),
            end,
            then=Call.done,
        )
    ]
    result = driver.run([{"role": "user", "content": "add"}], tools=[{"type": "function"}])
    assert result["finish_reason"] == "tool_calls"
    made = {"name": "add", "arguments": '{"a":1}'}
    assert result["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hmm.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": made}],
    }
    assert len(driver.pieces[0]) == 5
    assert driver.pieces[0][2] == {"text": "", "delta": first}

    likely: dict[str, Any] = {"token": "a", "logprob": -0.1, "bytes": [97]}
    likely |= {"top_logprobs": [{"token": "b", "logprob": -2}]}
    of_chat = delta({"content": "a"}, logprobs={"content": [likely]})
    server.replies["chat"] = [raw(of_chat, end, then=Call.done)]
    result = driver.run([{"role": "user", "content": "chat"}], logprobs=1)
    told: Any = {"token": "a", "id": None, "logprob": -0.1, "top": [["b", None, -2]]}
    told["bytes"] = [[97], None]
    assert result["logprobs"] == driver.pieces[1][0]["logprobs"] == [told]
    assert server.asked[-1].body["logprobs"] is True
    assert server.asked[-1].body["top_logprobs"] == 1


def test_whole_calls_of_tools_get_an_index(server: OpenAIServer, driver: StepDriver) -> None:
    calls: Any = [{"id": "a", "function": {}}, {"id": "b", "function": {}, "index": None}]
    deltas = [{"choices": [{"delta": {"tool_calls": [each]}}]} for each in calls]
    end = {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}
    server.replies["calls"] = [raw(*deltas, end, then=Call.done)]
    message = driver.run([{"role": "user", "content": "calls"}])["message"]
    assert [each["id"] for each in message["tool_calls"]] == ["a", "b"]
    indexes = [piece["delta"]["tool_calls"][0]["index"] for piece in driver.pieces[0]]
    assert indexes == [0, 1]


def test_busy_and_failing_server_is_asked_again_as_late_as_it_says(
    server: OpenAIServer, driver: StepDriver
) -> None:
    server.replies["busy"] = [status(429, retry_after="1"), echo]
    never = "Fri, 31 Dec 99999999999999999999 23:59:59 GMT"
    server.replies["broken"] = [status(500), status(503, retry_after=never), echo]
    server.replies["hung up"] = [cut_after("HUNG"), echo]
    server.replies["breaks off"] = [raw({"error": {"message": "overloaded", "code": 503}}), echo]
    slots = [driver.join(prompt) for prompt in server.replies]
    texts = [each["text"] for each in driver.wait(*slots)]
    assert texts == ["BUSY ", "BROKEN ", "HUNG UP ", "BREAKS OFF "]
    # Nothing is repeated for those who stream.
    assert driver.text(slots[2]) == "HUNG UP "
    first, second = (asked.at_s for asked in server.asked if asked.prompt == "busy")
    assert second - first >= 1


def test_waiting_for_a_server_gives_a_sign_of_life(
    server: OpenAIServer, driver: StepDriver
) -> None:
    server.replies["slow"] = [pause_after("a", 600)]
    driver.model.is_streamed = False
    slot = driver.join("slow")
    wait_for(lambda: server.running, "it is asked")
    assert [list(driver.model.step()) for _ in range(3)] == [[Advance(slot)]] * 3
    driver.model.leave(slot)
    assert driver.model.step() == []


def test_events_without_data_are_none(server: OpenAIServer, driver: StepDriver) -> None:
    async def reply(call: Call) -> None:
        await call.head()
        await call.part(b"retry: 3000\n\n")
        await call.words("a")
        await call.part(b"event: ping\ndata:\n\nid: 7\n\n")
        await call.done()

    server.replies["pings"] = [reply]
    assert driver.run("pings")["text"] == "a "


def test_refusals_fail_at_once_and_say_why(server: OpenAIServer, driver: StepDriver) -> None:
    server.replies["who"] = [status(401, "bad key")]
    server.replies["where"] = [status(404, "no model tiny")]
    server.replies["what"] = [status(400, "top_k is not supported")]
    server.replies["which"] = [
        raw({"error": {"message": "too long", "code": 400}}, content_type="text/event-stream")
    ]
    server.replies["later"] = [status(429, retry_after="86400")]
    server.replies["elsewhere"] = [status(307, location="http://127.0.0.1:1/")]
    server.replies["quota"] = [status(429, "pay", "insufficient_quota")]
    server.replies["long"] = [status(400, "too long", "context_length_exceeded")]
    outcomes = driver.wait(*[driver.join(prompt) for prompt in server.replies])
    errors = find_errors(outcomes)
    assert f"server {server.url}/: it answered 401: bad key; check api_key_env" == errors[0]
    assert "404: no model tiny; check base_url and model" in errors[1]
    kinds = [type(outcome.exception) for outcome in outcomes]
    assert kinds == [
        *(ServerRefused, ServerRefused, InvalidItem, InvalidItem, ServerBusy, ServerRefused),
        *(ServerRefused, PromptTooLong),
    ]
    assert outcomes[4].exception.retry_after_s == 86400
    assert "400: top_k is not supported" in errors[2]
    assert "it broke off: too long" in errors[3]
    assert "it asks for a pause of 86400 s" in errors[4]
    assert "it answered 307" in errors[5]
    assert len(server.asked) == 8
    with pytest.raises(InvalidItem, match="keyword top_q: no such keyword"):
        driver.run("a text", top_q=1)
    with pytest.raises(InvalidItem, match="not empty"):
        driver.run({"messages": []})


def answering(*parts: bytes, code: int = 200, is_endless: bool = False, **headers: str) -> Any:
    """Says some parts, the last one again and again if it is endless."""

    async def reply(call: Call) -> None:
        await call.head(code, **headers)
        for part in parts:
            await call.part(part)
        while is_endless:
            await call.part(parts[-1])
            await asyncio.sleep(0.005)
        await call.part(b"")

    return reply


async def endless_end(call: Call) -> None:
    await call.head()
    await call.words(call.asked.prompt.upper())
    while True:
        await call.event("[DONE]")
        await asyncio.sleep(0.01)


async def nonsense(call: Call) -> None:
    await call.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    raise Cut


WORDS = b'data: {"choices": [{"text": "word "}]}\n\n' * 100

LIES: dict[str, tuple[Any, str]] = {
    "json": (raw("{not json"), r"none of a completion: \{not json"),
    "list": (raw([1, 2]), r"none of a completion: \[1, 2\]"),
    "types": (raw({"choices": [{"index": "no"}]}), "none of a completion"),
    "text": (raw({"choices": [{"text": ["a"]}]}), "none of a completion"),
    "delta": (raw({"choices": [{"delta": {"content": 5}}]}), "none of a completion"),
    "calls": (raw({"choices": [{"delta": {"tool_calls": [5]}}]}), "none of a completion"),
    "logprobs": (raw({"choices": [{"logprobs": {"content": [5]}}]}), "none of a completion"),
    "choice": (raw({"choices": [{"index": 9, "text": "a"}]}), "none of a completion"),
    "usage": (raw({"usage": {"prompt_tokens": -1}}), "none of a completion"),
    "page": (raw("<html>", content_type="text/html"), "no stream of events: .*'text/html'"),
    "nothing": (raw("[DONE]"), "ended its stream without a finish_reason"),
    "line": (answering(b"data: ", b"x" * 65536, is_endless=True), "no stream of events: .*limit"),
    "endless": (answering(WORDS, is_endless=True), "goes on after 1048576 characters"),
    "comments": (
        answering(b": still here\n\n", is_endless=True),
        "it sent nothing new for .*; gave up",
    ),
    "silent": (pause_after("a", 60), "it sent nothing new for .*; gave up"),
    "protocol": (nonsense, "gave up after"),
    "packed": (
        answering(b"data: [DONE]\n\n", content_encoding="gzip"),
        "decompressing data.*gave up after",
    ),
    "nested": (answering(b"[" * 60_000, code=500), r"it answered 500: \[{300}"),
    "verbose": (raw({"error": {"code": 404, "message": "x" * 1000}}), "it broke off: x{300}"),
    "cut": (cut_after("CUT"), "its stream ended before|incomplete.*gave up after"),
}

SILENT = ("comments", "silent")


def test_lying_and_slow_servers_fail_their_own_job_in_one_line(
    server: OpenAIServer, start: Start
) -> None:
    # Only those who say nothing are given up soon: the others have much to say.
    hasty = start(server_timeout_s=2, server_retry_s=1)
    driver = start(server_timeout_s=patient(60), server_retry_s=1)
    server.replies.update({name: [reply] for name, (reply, _) in LIES.items()})
    late = [hasty.join(name) for name in SILENT]
    others = {name: driver.join(name) for name in LIES if name not in SILENT}
    server.replies["the end"] = [endless_end]
    good = driver.join("still fine"), driver.join("the end")
    outcomes = driver.wait()
    assert [outcomes[slot]["text"] for slot in good] == ["STILL FINE ", "THE END "]
    failed = dict(zip(SILENT, hasty.wait(*late), strict=True))
    failed |= {name: outcomes[slot] for name, slot in others.items()}
    for name, (_, expected) in LIES.items():
        (error,) = find_errors([failed[name]]).values()
        assert re.search(expected, error), f"{name}: {error}"
        assert isinstance(failed[name].exception, ServerFailed)
        assert "\n" not in error
        assert len(error) < 600
    wait_for(lambda: server.running == 0, "all their connections are closed")


def test_second_stream_goes_on_only_from_what_readers_have(
    server: OpenAIServer, driver: StepDriver
) -> None:
    server.replies["differs"] = [cut_after("SOMETHING"), echo]
    slot = driver.join("differs")
    (outcome,) = driver.wait(slot)
    assert "does not go on from what readers have" in str(outcome.exception)
    assert driver.text(slot) == "SOMETHING "

    # It ends before that.
    server.replies["some"] = [cut_after("SOME THING"), echo]
    slot = driver.join("some")
    (outcome,) = driver.wait(slot)
    assert "does not go on from what readers have" in str(outcome.exception)
    assert driver.text(slot) == "SOME THING "

    # Where nobody streams, it need not agree.
    driver.model.is_streamed = False
    server.replies["nobody"] = [cut_after("SOMETHING"), echo]
    slot = driver.join("nobody")
    assert driver.wait(slot)[0]["text"] == "NOBODY "
    assert driver.pieces[slot] == []

    # Pieces of a worker that has died.
    slot = driver.join("go on here", [{"text": "GO "}, {"text": "ON "}])
    assert driver.wait(slot)[0]["text"] == "GO ON HERE "
    assert driver.text(slot) == "HERE "
    for name in ("tool_calls", "reasoning_content"):
        piece = {"text": "", "delta": {name: "a part"}}
        with pytest.raises(ServerFailed, match=rf"^server {server.url}/: .*what readers have"):
            driver.run("more than a text", [{"text": "MORE "}, piece])
    assert not server.count("more than a text")


def test_server_that_is_away_is_waited_for_and_then_named(start: Start) -> None:
    url = "http://127.0.0.1:1/v1"  # Nobody listens there.
    driver = start(base_url=url, server_retry_s=1)
    with pytest.raises(ServerFailed, match=rf"{url}.*attempts.*; gave up after \d attempts, as"):
        driver.run("anybody")
    with pytest.raises(ModelLoadError, match="needs a base_url"):
        start(base_url=None)


def test_api_key_comes_from_the_variable_that_the_setting_names(
    server: OpenAIServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-abc")
    start(api_key_env="TINY_KEY").run("hello")
    assert server.asked[0].headers["authorization"] == "bearer sk-abc"
    with pytest.raises(SettingsError, match="variable NO_KEY: a setting names it"):
        start(api_key_env="NO_KEY")


def test_password_of_the_url_reaches_the_server_and_nothing_else(
    server: OpenAIServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.replies["who"] = [status(401)]
    driver = start(base_url=server.url.replace("//", "//a%20user:top%40secret@"))
    slots = driver.join("hello"), driver.join("who")
    told = str(driver.wait(*slots)[1].exception) + caplog.text
    assert f"POST {server.url}/completions" in told
    assert "secret" not in told
    sent = base64.b64encode(b"a user:top@secret").decode().lower()
    assert {asked.headers["authorization"] for asked in server.asked} == {f"basic {sent}"}


def test_two_hundred_jobs_run_at_once_and_those_that_leave_hang_up(
    server: OpenAIServer, driver: StepDriver
) -> None:
    slow = pause_after("a", 600)
    server.replies = {f"slow {number}": [slow] for number in range(200)}
    slots = [driver.join(prompt) for prompt in server.replies]

    def all_began() -> bool:
        driver.step()
        return all(driver.pieces.values())

    wait_for(all_began, "all have their first piece")
    assert server.running == 200
    assert driver.run("in between")["text"] == "IN BETWEEN "
    for slot in slots:
        driver.model.leave(slot)
    wait_for(lambda: server.running == 0, "the server notices that nobody waits")
    driver.step()
    assert not driver.outcomes.keys() & set(slots)


@pytest.fixture(scope="module")
def far() -> Iterator[OpenAIServer]:
    """The server of the worker."""
    with OpenAIServer() as made:
        yield made


@pytest.fixture(scope="module")
def worker(
    start_module_worker: StartWorker,
    far: OpenAIServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Worker:
    folder = tmp_path_factory.mktemp("served")
    (folder / "batchery.toml").write_text(
        '[models.chat]\nkind = "generation"\nengine = "openai"\nmodel = "tiny"\n'
        f'base_url = "{far.url}"\napi_key_env = "FAR_KEY"\nserver_retry_s = 1\n'
    )
    return start_module_worker(
        "batchery.app", "-Q", "chat", cwd=folder, env={"FAR_KEY": "sk-far", "PYTHONPATH": ""}
    )


@pytest.mark.usefixtures("worker")
def test_jobs_of_a_worker_get_texts_streams_and_errors_of_the_server(
    far: OpenAIServer, client: Celery, redis_url: str
) -> None:
    def send(item: Any, **keywords: Any) -> Any:
        return client.send_task("chat", [item], keywords, queue="chat")

    far.replies["who"] = [status(401, "bad key")]
    far.replies["slow"] = [pause_after("a", 600)]
    slow = send("slow")
    jobs = [send(f"job {number}") for number in range(300)]
    results = [Generation.model_validate(job.get(timeout=patient(60))) for job in jobs]
    assert [each.text for each in results] == [f"JOB {number} " for number in range(300)]
    assert far.asked[0].headers["authorization"] == "bearer sk-far"
    with pytest.raises(Exception, match="it answered 401: bad key") as caught:
        send("who").get(timeout=patient(60))
    assert type(caught.value).__name__ == "ServerRefused"

    with Client(redis_url) as own:
        stream = own.task("chat").stream([{"role": "user", "content": "one two"}])
        assert "".join(piece["text"] for piece in stream) == "ONE TWO "
        assert stream.result["text"] == "ONE TWO "

    # A result comes a moment before the end of its stream.
    wait_for(lambda: far.running == 1, "only the slow one runs")
    slow.revoke(terminate=True)
    wait_for(lambda: far.running == 0, "the request of the revoked job is cancelled")
    with pytest.raises(TaskRevokedError):
        slow.get(timeout=patient(60))


@pytest.mark.usefixtures("worker")
def test_gateway_says_whether_to_come_again_and_nothing_of_its_server(
    far: OpenAIServer, start_gateway: StartGateway
) -> None:
    model = {"kind": "generation", "engine": "openai", "model": "tiny", "base_url": far.url}
    gateway = start_gateway(models={"chat": model})
    far.replies["refused"] = [status(401, "bad key sk-far")]
    far.replies["busy"] = [status(429, "far too many", retry_after="7")]
    far.replies["broken"] = [status(500, "far away")]
    expected = {
        "refused": (502, "false", None),
        "busy": (429, None, "7"),
        "broken": (502, None, None),
    }
    for prompt, found in expected.items():
        for is_stream in (False, True):
            body = {"model": "chat", "prompt": prompt, "stream": is_stream}
            answer = gateway.post("/v1/completions", body)
            headers = [answer.headers.get(name) for name in ("x-should-retry", "retry-after")]
            assert (answer.status_code, *headers) == found
            assert "the server behind the model" in answer.text
            assert not re.search(r"127\.0\.0\.1|sk-far|far ", answer.text)
    assert far.count("refused") == 2
    assert "bad key sk-far" in gateway.log
    assert "far too many" in gateway.log
