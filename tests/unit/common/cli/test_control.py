"""What `batchery reload` and `batchery drain` say of the answers."""

from collections.abc import Mapping
from typing import Any

import pytest

from batchery.cli.control import (
    choose,
    describe_drain,
    describe_reload,
)

Answers = Mapping[str, Mapping[str, Any]]


def step(state: str = "reloaded", **fields: Any) -> dict[str, Any]:
    return {"state": state, "version": "", "before": "", "load_s": 1.25, "error": "", **fields}


def answer(is_over: bool = True, error: str = "", **devices: Any) -> dict[str, Any]:
    return {"devices": devices, "is_over": is_over, "error": error}


def test_each_device_has_a_line() -> None:
    lines, is_done = describe_reload(
        "embed",
        {
            "b@host": answer(cpu=step()),
            "a@host": answer(cpu=step(version="v2", before="v1")),
            "other@host": answer(),
        },
    )
    assert lines == [
        "a@host cpu: embed is version v2, before it was v1, 1.2 s to load",
        "b@host cpu: embed is reloaded, 1.2 s to load",
    ]
    assert is_done


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (
            {"a": answer(cpu=step("failed", error="no such folder"))},
            "a cpu: not reloaded, embed goes on as before: no such folder",
        ),
        ({"a": answer(error="kind has changed")}, "a: not reloaded: kind has changed"),
        ({"a": {"silent": True}}, "a: does not answer any more; it may do it yet"),
        ({"a": answer()}, "no worker serves a model 'embed'; see `batchery stats`"),
    ],
)
def test_what_was_not_done_is_said(answers: Answers, line: str) -> None:
    assert describe_reload("embed", answers) == ([line], False)


def test_a_card_stands_for_all_of_its_processes() -> None:
    states = {"cuda:0": "ready", "cuda:0/chat": "drained", "cuda:1": "ready"}
    assert choose(states, "cuda:0") == {"cuda:0": "ready", "cuda:0/chat": "drained"}
    assert choose(states, "cuda:0/chat") == {"cuda:0/chat": "drained"}
    assert choose(states, "cuda") == {}


def test_a_device_that_is_given_up_says_why() -> None:
    states = {"cuda:0": "given up", "cuda:0/chat": "ready", "cuda:1": "ready"}
    errors = {"cuda:0": "no driver"}
    answers: Answers = {"a": {"devices": states, "errors": errors}, "b": {"silent": True}}
    lines = ["a: cuda:0 is given up: no driver", "a: cuda:0/chat is ready"]
    assert describe_drain("cuda:0", answers) == (lines, False)
    assert describe_drain("cuda:1", answers) == (["a: cuda:1 is ready"], True)
