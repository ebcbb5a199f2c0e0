"""What a completion backend adds to Celery's for Redis: held results, and shared chord claims."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery.completion import JobCompletion, Outbox, completing
from batchery.retry import RetryDeadline
from batchery_worker.completion import backend as module
from batchery_worker.completion.backend import IS_OVER, UNREADABLE, for_completion


class Script:
    """One of Celery's scripts, with the test's answer."""

    def __init__(self, *answer: int) -> None:
        self.answer: Any = answer
        self.args: list[Any] = []

    def __call__(self, *, keys: Sequence[str], args: Sequence[Any], client: Any) -> Any:
        self.args.append(list(args))
        return self.answer


def claim(script: Any, holder: Any = None) -> Any:
    """Counts a part of a chord; `holder` is who holds its claim by then."""
    client = SimpleNamespace(get=lambda key: holder if key == "claim" else None)
    return module._claim(script, ["parts", "claim"], ["part", "of Celery"], client)


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    """That of the job which is being completed."""
    made = Outbox("tag", {}, task_id="t1")
    with completing(JobCompletion("t1", outbox=made)):
        yield made


# Chords


def test_job_of_another_transport_counts_its_part_as_celery_does() -> None:
    script = Script(1, 0, 1, 0)
    assert claim(script) == (1, 0, 1, 0)
    assert script.args == [["part", "of Celery"]]


@pytest.mark.parametrize("holder", ["tag", b"tag"])
def test_all_attempts_of_a_job_share_the_claim_of_its_chord(outbox: Outbox, holder: Any) -> None:
    script = Script(3, 1, 2, 0)
    # An earlier attempt has claimed it, and died before it published the body.
    assert claim(script, holder) == (3, 1, 2, 1)
    assert script.args == [["part", "tag"]]


@pytest.mark.parametrize(
    ("answer", "holder"),
    [((3, 1, 2, 0), "another"), ((3, 1, 2, 0), None), ((2, 1, 2, 0), "tag"), ((0, 0, 0, 0), "tag")],
)
def test_claim_of_another_job_or_of_a_chord_that_is_not_complete_is_respected(
    outbox: Outbox, answer: tuple[int, ...], holder: Any
) -> None:
    assert claim(Script(*answer), holder) == answer


def test_part_is_counted_later_where_the_outbox_holds(outbox: Outbox) -> None:
    outbox.holds = True
    script = Script(1, 0, 1, 1)
    assert claim(script) == IS_OVER
    assert script.args == []
    assert outbox.part_calls == [(["parts", "claim"], ["part", "tag"])]


@pytest.mark.parametrize(
    ("answer", "is_counted"),
    [
        (IS_OVER, True),
        ((1, 0, 0, 0), True),
        ((1, 0, 2, 0), True),
        ((2, 0, 2, 1), False),
        ((3, 1, 2, 0), False),
        ((2, 1, 2, 0), True),
        (ValueError("refused"), False),
    ],
)
def test_part_must_be_counted_once_more_if_it_was_the_last_or_was_refused(
    answer: Any, is_counted: bool
) -> None:
    assert module._is_counted(answer) is is_counted


def test_claim_is_kept_and_removed_by_its_tag(outbox: Outbox) -> None:
    for function in (module._extend, module._clean_up):
        script = Script(7)
        assert function(script, ["claim"], ["of Celery", 30], None) == (7,)
        assert script.args == [["tag", 30]]


def test_claim_without_a_tag_is_celery_s() -> None:
    for function in (module._extend, module._clean_up):
        script = Script(7)
        function(script, ["claim"], ["of Celery", 30], None)
        assert script.args == [["of Celery", 30]]


def test_keys_of_a_chord_stay_for_the_next_attempt_if_time_ran_out() -> None:
    deadline, script = RetryDeadline(), Script(7)
    deadline.is_exceeded = True
    with completing(JobCompletion("t1", deadline=deadline)):
        assert module._clean_up(script, ["claim"], ["of Celery"], None) == 1
    assert script.args == []


# Results


class Store:
    """The script that stores results, with the test's answer."""

    def __init__(self) -> None:
        self.answer = 1
        self.ran: list[tuple[Any, ...]] = []

    def run(self, name: str, keys: Sequence[Any], *args: Any) -> int:
        self.ran.append((name, keys[0], *args))
        return self.answer


class Scene:
    """A completion backend, and what is left to Celery's."""

    backend: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **conf: Any) -> None:
        app = Celery("held", broker="memory://", backend="redis://127.0.0.1:1/0")
        app.conf.update(conf)
        self.backend = for_completion(app.backend)
        self.store = Store()
        self.backend.__dict__["_result_scripts"] = self.store
        self.stock: list[str] = []
        #: State that is stored already.
        self.status = "PENDING"
        monkeypatch.setattr(
            RedisBackend, "_set_with_state", lambda *args: self.stock.append(args[-1])
        )
        monkeypatch.setattr(RedisBackend, "_get_task_meta_for", lambda *_: {"status": self.status})
        self.key = self.backend.get_key_for_task("t1")

    def set(self, state: str = "SUCCESS", value: bytes = b"{}") -> None:
        self.backend._set_with_state(self.key, value, state)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch, result_expires=60)


def test_result_is_written_by_the_script_that_looks_for_a_success(scene: Scene) -> None:
    scene.set()
    assert scene.store.ran == [("store", scene.key, 60, b"{}")]
    assert scene.stock == []


def test_failures_may_expire_by_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, result_expires=60)
    scene.backend.failure_expires = 5
    for state in ("SUCCESS", "FAILURE"):
        scene.set(state)
    scene.backend.expires = None
    scene.set("SUCCESS")
    assert [expires_s for *_, expires_s, _ in scene.store.ran] == [60, 5, 0]


@pytest.mark.parametrize(("status", "stock"), [("PENDING", ["SUCCESS"]), ("SUCCESS", [])])
def test_result_behind_one_that_the_script_cannot_read_is_written_unless_that_is_a_success(
    scene: Scene, status: str, stock: list[str]
) -> None:
    scene.store.answer, scene.status = UNREADABLE, status
    scene.set()
    assert scene.stock == stock


def test_what_is_no_result_or_too_large_is_written_by_celery(scene: Scene) -> None:
    scene.backend._set_with_state("another-key", b"{}", "SUCCESS")
    scene.backend._MAX_STR_VALUE_SIZE = 2
    scene.set(value=b"{}")
    scene.set(value=b"{ }")
    assert scene.stock == ["SUCCESS", "SUCCESS"]
    assert len(scene.store.ran) == 1


def test_result_is_held_back_and_counts_as_not_stored_until_it_is(
    scene: Scene, outbox: Outbox
) -> None:
    scene.status = "FAILURE"
    assert scene.backend._get_task_meta_for("t1") == {"status": "FAILURE"}
    outbox.holds = True
    assert scene.backend._get_task_meta_for("t1") == {"status": "PENDING"}
    assert scene.backend._get_task_meta_for("t2") == {"status": "FAILURE"}
    scene.set()
    assert (outbox.result, outbox.expires_s, scene.store.ran) == (b"{}", 60, [])
    # Another job's, such as the body of a chord that failed, is not.
    scene.backend._set_with_state(scene.backend.get_key_for_task("t2"), b"{}", "FAILURE")
    assert len(scene.store.ran) == 1
    outbox.replay()
    assert len(scene.store.ran) == 2


def test_result_that_redis_cannot_hold_is_not_held_back(scene: Scene, outbox: Outbox) -> None:
    outbox.holds = True
    scene.backend._MAX_STR_VALUE_SIZE = 1
    scene.set()
    assert (outbox.result, scene.stock) == (b"", ["SUCCESS"])


def test_device_has_stored_that_its_job_began(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = for_completion(
        Celery("began", backend="cache+memory://", set_as_current=False).backend
    )
    # Celery has one such store for a process, and other tests have jobs there.
    first, second, third = ("began 1", "began 2", "began 3")
    with completing(JobCompletion(first)):
        assert backend.store_result(first, "meta", "STARTED") == "meta"
        backend.store_result(second, "meta", "STARTED")
    backend.store_result(third, "meta", "STARTED")
    states = [backend.get_state(task_id) for task_id in (first, second, third)]
    assert states == ["PENDING", "STARTED", "STARTED"]


def test_parts_of_chords_are_held_back_or_counted(
    scene: Scene, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(
        RedisBackend, "on_chord_part_return", lambda _, request, *__: counted.append(request)
    )
    scene.backend.on_chord_part_return("a", "SUCCESS", 1)
    assert outbox._counts == []
    outbox.holds = True
    scene.backend.on_chord_part_return("b", "SUCCESS", 1)
    assert len(outbox._counts) == 1
    assert counted == ["a", "b"]
