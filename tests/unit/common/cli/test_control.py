"""What `batchery reload` and `batchery drain` say of the answers, and how long they ask."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from celery import Celery

from batchery import StartError
from batchery.cli import control
from batchery.cli.control import (
    choose,
    describe_drain,
    describe_reload,
    follow,
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


class Cluster:
    """Workers, each with its answers, one a second; the last one is repeated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[list[str]] = []
        #: Of those that Redis takes for dead.
        self.dead: set[str] = set()
        self.now_s = 0.0
        monkeypatch.setattr(control, "check_broker", lambda _: None)
        monkeypatch.setattr(control, "registered_workers", lambda _: {})
        monkeypatch.setattr(control, "find_workers", lambda *_: set(self.answers) - self.dead)
        monkeypatch.setattr(control, "ask_workers", self.ask)
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("time.sleep", lambda _: None)

    def ask(self, app: Any, command: str, timeout_s: float, names: set[str], **_: Any) -> Any:
        self.now_s += timeout_s
        self.asked.append(sorted(names))
        found = {}
        for name in names:
            left = self.answers.get(name, [])
            reply = left.pop(0) if len(left) > 1 else left[0]
            if reply is not None:
                found[name] = reply
        return found

    def follow(self, worker: str | None = None) -> Answers:
        is_over: Callable[[Any], bool] = lambda each: each["is_over"]  # noqa: E731
        return follow(Celery(), worker, 1.0, is_over, "batchery_reload", number="1")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_workers_are_asked_until_all_are_done(cluster: Cluster) -> None:
    cluster.answers = {
        "quick": [answer(cpu=step())],
        "slow": [None, answer(is_over=False), answer(cpu=step())],
        "without": [{"error": "it has no device"}],
    }
    assert set(cluster.follow()) == {"quick", "slow"}
    assert cluster.asked == [["quick", "slow", "without"], ["slow"], ["slow"]]


@pytest.mark.parametrize(("first", "said"), [(answer(is_over=False), True), (None, False)])
def test_a_worker_that_dies_is_named_if_it_had_answered(
    cluster: Cluster, *, first: Any, said: bool
) -> None:
    cluster.answers = {"dies": [first, None], "lives": [answer(cpu=step())]}
    ask = cluster.ask

    def die(*arguments: Any, **options: Any) -> Any:
        found = ask(*arguments, **options)
        cluster.dead = {"dies"}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "ask_workers", die)
        assert ("dies" in cluster.follow()) is said
    assert cluster.now_s < 5


def test_only_a_worker_that_is_named_is_asked(cluster: Cluster) -> None:
    cluster.answers = {"one": [answer(cpu=step())], "two": [answer(cpu=step())]}
    assert set(cluster.follow("two")) == {"two"}
    began_s = cluster.now_s
    with pytest.raises(StartError, match="no worker 'three' with devices answers"):
        cluster.follow("three")
    # Nobody knows it, so nobody waits for it.
    assert cluster.now_s == began_s
