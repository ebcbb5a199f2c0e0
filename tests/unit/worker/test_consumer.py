"""Which messages are let through to Celery."""

import json
from typing import Any

import pytest
import redis
from celery.exceptions import InvalidTaskError
from kombu import compression
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.message import Message

from batchery import InvalidItem
from batchery.transport import dead_letters
from batchery_worker.consumer import (
    OutageLog,
    bound_decompression,
    check,
)

JSON = "application/json"
TEXT: dict[str, Any] = {"content_type": JSON, "content_encoding": "utf-8", "accept": {JSON}}
HEADERS = {"task": "shop.shout", "id": "an-id"}


def message(body: Any, headers: Any = HEADERS, **options: Any) -> Message:
    text = body if isinstance(body, str) else json.dumps(body)
    made = Message(body=text, **{**TEXT, **options})
    made.headers = headers
    return made


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (HEADERS, [["x"], {}, {}]),
        (HEADERS, [["x"], {}, None]),
        # Both protocols at once, as some clients send it.
        (HEADERS, {"args": ["x"], "kwargs": {}}),
        # The first protocol.
        ({}, {"task": "shop.shout", "id": "an-id", "args": ["x"], "kwargs": {}}),
        # No job, but Celery knows what to do with it.
        ({}, {"hello": "world"}),
        ({}, 7),
    ],
)
def test_what_celery_can_read_is_let_through(headers: Any, body: Any) -> None:
    check(message(body, headers))


@pytest.mark.parametrize("body", [None, 7, "args", "text", [], [1, 2], ["args"], {"a": 1}, True])
def test_a_body_of_another_form_is_refused(body: Any) -> None:
    with pytest.raises(InvalidTaskError, match="body is not a list of arguments"):
        check(message(json.dumps(body)))


@pytest.mark.parametrize("name", ["task", "id", "shadow"])
@pytest.mark.parametrize("value", ["x\n[2026-01-01 00:00:00] ERROR", "\x1b[2J", "a\u2028b"])
def test_names_that_would_write_lines_of_a_log_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidTaskError, match=f"its {name} is .*printed") as caught:
        check(message([["x"], {}, {}], {**HEADERS, name: value}))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "limits", [[-1, None], [None, -0.5], [float("nan"), 1], [1e400, None], [10**400, None]]
)
def test_time_limits_that_are_no_times_are_refused(limits: list[Any]) -> None:
    for allowed in ([None, None], [0, None], [0.5, 1]):
        check(message([["x"], {}, {}], {**HEADERS, "timelimit": allowed}))
    with pytest.raises(InvalidTaskError, match=r"its timelimit\.[01] is "):
        check(message([["x"], {}, {}], {**HEADERS, "timelimit": limits}))


@pytest.fixture
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders: Any = vars(compression)["_decoders"]
    monkeypatch.setattr(compression, "_decoders", {**decoders})
    monkeypatch.setattr(dead_letters, "MAX_MESSAGE_BYTES", 50_000)
    bound_decompression()


def compressed(body: Any, method: str) -> Message:
    made = Message(body=body, headers={**HEADERS, "compression": method}, **TEXT)
    if made.errors:
        # As kombu's consumer does.
        made._reraise_error()
    return made


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("method", compression.encoders())
def test_a_body_that_says_too_much_is_decompressed_no_further(method: str) -> None:
    job = json.dumps([["x" * 10_000], {}, {}])
    body, _ = compression.compress(job, method)
    assert compressed(body, method).payload[0] == ["x" * 10_000]
    for wrong, error in ((body[:-1], "not one whole stream"), (body + b"x", "one whole stream")):
        with pytest.raises(ValueError, match=error):
            compressed(wrong, method)
    bomb, _ = compression.compress(json.dumps([["x" * 50_000], {}, {}]), method)
    assert len(bomb) < 1000
    with pytest.raises(InvalidItem, match="has 50,001 bytes, and the maximum is 50,000"):
        compressed(bomb, method)


@pytest.mark.parametrize("name", ["task", "id"])
@pytest.mark.parametrize("value", [None, 7, ["a list"], {"a": 1}])
def test_names_that_are_no_texts_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidTaskError, match=f"its {name} is"):
        check(message([["x"], {}, {}], {**HEADERS, name: value}))
    first = {"task": "t", "id": "i", "args": [], "kwargs": {}, name: value}
    with pytest.raises(InvalidTaskError, match=f"its {name} is"):
        check(message(first, {}))


def test_headers_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(InvalidTaskError, match="not a mapping"):
        check(message([["x"], {}, {}], ["task"]))


def test_what_cannot_be_decoded_is_told_apart_from_what_must_not_be() -> None:
    with pytest.raises(DecodeError):
        check(message("not json"))
    with pytest.raises(ContentDisallowed):
        check(message("x", content_type="application/x-python-serialize"))


def test_broker_that_is_away_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = OutageLog("redis://one//", clock=lambda: now_s[0])
    for second in range(150):
        now_s[0] = float(second)
        log(redis.ConnectionError("refused."), 1.0)
    assert len(caplog.messages) == 3
    assert "Cannot connect to redis://one//: refused. Trying on" in caplog.messages[0]


def test_wrong_password_is_logged_with_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    OutageLog("redis://one//")(redis.AuthenticationError("invalid password"), 1.0)
    [line] = caplog.messages
    assert "invalid password; set its user and password in broker_url" in line
