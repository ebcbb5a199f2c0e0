"""What `batchery reload` says of the answers."""

from collections.abc import Mapping
from typing import Any

import pytest

from batchery.cli.control import (
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
