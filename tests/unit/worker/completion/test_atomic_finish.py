"""How jobs whose messages and results are held back are finished: in one step, or in several.

The scripts are stand-ins. What they do in Redis is held by the tests on a real one.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from batchery.completion import Outbox
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.completion import atomic_finish as module
from batchery_worker.completion.atomic_finish import AtomicFinisher, WithheldJob
from batchery_worker.request import LeaseHandle
from support.fake_worker import FakeLeaseStore

COMMITTED, FENCED, TRACER = (
    CommitStatus.COMMITTED,
    CommitStatus.FENCED,
    CommitStatus.NEEDS_TRACER,
)


class Server:
    """A Redis: its answers by script, and what was run."""

    def __init__(self) -> None:
        self.connection_pool = SimpleNamespace(connection_kwargs={"db": 3})
        self.ran: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}
        #: Results that are stored.
        self.stored: dict[str, bytes] = {}

    def run_many(self, name: str, calls: Sequence[Any]) -> Any:
        self.ran.append((name, list(calls)))
        return self.answers[name]

    def run(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        self.ran.append((name, list(args)))
        return self.answers[name]

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.stored.get(key) for key in keys]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]


class Scene:
    """A finisher with the servers of results and of leases."""

    def __init__(self) -> None:
        self.results, self.broker = Server(), Server()
        #: Whether each part of a chord is done with.
        self.counted: list[bool] = []
        backend = SimpleNamespace(
            client=self.results,
            get_key_for_task=lambda task_id: f"result-{task_id}",
            count_parts=lambda calls: self.counted[: len(calls)],
        )
        self.finisher = AtomicFinisher(backend)
        self.worker = "w1"

    def job(self, token: str, result: str = "{}", *, is_part: bool = False) -> WithheldJob:
        store: Any = FakeLeaseStore()
        store.worker, store.client = self.worker, self.broker
        outbox = Outbox(f"tag-{token}", {}, task_id=token)
        outbox.result = result
        if is_part:
            outbox.part_calls.append(([], []))
        return WithheldJob(LeaseHandle(store, token), outbox)

    def finish(self, *jobs: WithheldJob) -> list[CommitStatus]:
        return self.finisher.finish(jobs)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(module, "result_scripts", lambda client: client)
    return Scene()


def test_with_one_server_all_is_written_in_one_step(scene: Scene) -> None:
    scene.results.answers = {"finish": [1, 0, 2, ValueError("refused")]}
    jobs = [scene.job(token) for token in "1234"]
    assert scene.finish(*jobs) == [COMMITTED, FENCED, TRACER, TRACER]
    assert scene.results.names == ["finish"]
    assert scene.broker.ran == []
    (_, calls), *_ = scene.results.ran
    keys, args = calls[0]
    assert "result-1" in keys
    assert args == ["w1", 3, 0, 0, "1", "{}"]


def test_with_two_servers_results_are_stored_before_leases_end(scene: Scene) -> None:
    scene.results.answers = {"finish": [None, None], "store": [1]}
    scene.broker.answers = {"held": b"10", "finish": [1]}
    assert scene.finish(scene.job("1"), scene.job("2")) == [COMMITTED, FENCED]
    assert scene.results.names == ["finish", "store"]
    assert scene.broker.ran[0] == ("held", ["w1", "1 2"])
    # It is known where the leases are, so the next one is not tried in one step.
    scene.broker.answers = {"held": b"1", "finish": [1]}
    assert scene.finish(scene.job("3")) == [COMMITTED]
    assert scene.results.names == ["finish", "store", "store"]


def test_what_cannot_be_stored_is_left_to_the_tracer_with_its_lease(scene: Scene) -> None:
    scene.results.answers = {"finish": [None, None], "store": [2, 1]}
    scene.broker.answers = {"held": b"11", "finish": [1]}
    assert scene.finish(scene.job("1"), scene.job("2")) == [TRACER, COMMITTED]
    (_, calls) = scene.broker.ran[1]
    assert len(calls) == 1


def test_job_without_a_result_only_ends_its_lease(scene: Scene) -> None:
    scene.results.answers = {"finish": [None]}
    scene.broker.answers = {"held": b"1", "finish": [1]}
    assert scene.finish(scene.job("1", "")) == [COMMITTED]
    assert scene.results.names == ["finish"]


@pytest.mark.parametrize(
    ("result", "stored", "status"),
    [("{}", b"{}", COMMITTED), ("{}", b"other", FENCED), ("{}", None, FENCED), ("", None, FENCED)],
)
def test_lease_that_is_gone_was_ended_by_a_lost_answer_if_the_result_is_this_one(
    scene: Scene, result: str, stored: bytes | None, status: CommitStatus
) -> None:
    scene.results.answers = {"finish": [None]}
    scene.broker.answers = {"held": b"0"}
    if stored is not None:
        scene.results.stored["result-1"] = stored
    assert scene.finish(scene.job("1", result)) == [status]
    assert scene.broker.names == ["held"]


def test_worker_that_no_server_knows_leaves_all_to_the_tracer_until_it_has_another_id(
    scene: Scene,
) -> None:
    scene.results.answers = {"finish": [None, None]}
    scene.broker.answers = {"held": None}
    for _ in range(2):
        assert scene.finish(scene.job("1"), scene.job("2")) == [TRACER, TRACER]
    assert scene.broker.names == ["held"]
    scene.worker, scene.results.answers = "w2", {"finish": [1]}
    assert scene.finish(scene.job("3")) == [COMMITTED]


def test_parts_of_chords_are_counted_between_their_results_and_their_leases(scene: Scene) -> None:
    scene.results.answers = {"finish": [1], "store": [1, 1]}
    scene.broker.answers = {"held": b"11", "finish": [1]}
    # The last part sends the body, which the tracer does.
    scene.counted = [True, False]
    jobs = [scene.job("1", is_part=True), scene.job("2"), scene.job("3", is_part=True)]
    assert scene.finish(*jobs) == [COMMITTED, COMMITTED, TRACER]
    assert scene.results.names == ["finish", "store"]
