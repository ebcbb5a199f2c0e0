"""How a broken message is read and described, before it becomes a dead letter."""

import base64
import json
from typing import Any

import pytest

from batchery.transport.dead_letters import (
    MAX_REASON_CHARS,
    describe,
    find_queue,
    read_embed,
    readable_headers,
)

PREFIX = "shop:"
EMBED = {"callbacks": None, "errbacks": [{"task": "log"}], "chain": None, "chord": {"task": "sum"}}
BODY = json.dumps([[], {}, EMBED])


@pytest.mark.parametrize(
    "body", [None, 7, "", "[", "bm90IGpzb24=", "###", [[], {}, {}], "[[], {}]", "[[], {}, 7]"]
)
def test_headers_are_read_although_the_body_is_broken(body: Any) -> None:
    message = json.dumps({"headers": {"id": "an-id"}, "body": body}).encode()
    assert readable_headers(message) == {"id": "an-id"}


def test_headers_are_read_although_the_body_is_not_utf_8() -> None:
    assert readable_headers(b'{"headers": {"id": "an-id"}, "body": "\xff"}') == {"id": "an-id"}


@pytest.mark.parametrize(
    ("key", "queue"),
    [
        ("shop:embed", "embed"),
        ("shop:embed\x06\x163", "embed"),
        ("shop:embed\x06\x16x", "embed\x06\x16x"),
        # Of its tenants.
        ("shop:embed\x06\x16t7", "embed"),
        ("shop:embed\x06\x16t0\x06\x169", "embed"),
        ("shop:embed\x06\x16t8", "embed\x06\x16t8"),
        ("other", "other"),
    ],
)
def test_queue_is_named_by_its_key_without_prefix_and_priority(key: str, queue: str) -> None:
    assert find_queue(key, PREFIX) == queue


@pytest.mark.parametrize("body", [BODY, base64.b64encode(BODY.encode()).decode()])
def test_callbacks_and_chord_are_read_from_text_and_from_base64(body: str) -> None:
    assert read_embed(body) == EMBED
    message = json.dumps({"headers": {"id": "an-id"}, "body": body}).encode()
    assert readable_headers(message) == {"id": "an-id", **EMBED}


def test_header_outranks_an_entry_of_the_body_with_the_same_name() -> None:
    message = json.dumps({"headers": {"id": "an-id", "chord": "own"}, "body": BODY}).encode()
    assert readable_headers(message)["chord"] == "own"


@pytest.mark.parametrize("message", [b"", b"not json", b"[]", b'{"headers": {"id": 7}}'])
def test_message_without_a_readable_id_has_no_headers(message: bytes) -> None:
    assert readable_headers(message) == {}


def test_long_reason_is_cut() -> None:
    letter = describe("x" * (MAX_REASON_CHARS + 1), "an-id", "embed")
    assert letter["reason"] == "x" * MAX_REASON_CHARS
    assert (letter["id"], letter["task"]) == ("an-id", "embed")
