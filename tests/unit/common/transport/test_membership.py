from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from batchery.transport import membership
from batchery.transport.leases import Leases
from batchery.transport.membership import FailureDetector, Heartbeat
from batchery.transport.redis_schema import Keys

EXPIRY_S = 5.0


@pytest.fixture
def detector() -> FailureDetector:
    return FailureDetector(EXPIRY_S, max_gap_s=2.5)


def dead(
    detector: FailureDetector, looks: Iterable[tuple[float, dict[str, int]]]
) -> list[list[str]]:
    """Who is found dead at each look."""
    return [[name for name, _ in detector.observe(beats, now_s)] for now_s, beats in looks]


def test_worker_is_dead_after_an_unchanged_heartbeat_for_a_full_expiry(
    detector: FailureDetector,
) -> None:
    looks = [(second, {"silent": 7, "alive": second}) for second in range(6)]
    assert dead(detector, looks) == [[], [], [], [], [], ["silent"]]


def test_dead_workers_are_reported_with_their_last_heartbeat(detector: FailureDetector) -> None:
    for second in range(5):
        detector.observe({"silent": 7}, second)
    assert detector.observe({"silent": 7}, 5) == [("silent", 7)]


def test_new_heartbeat_restarts_the_expiry(detector: FailureDetector) -> None:
    looks = [(second, {"slow": second // 4}) for second in range(10)]
    assert dead(detector, looks) == [[]] * 9 + [[]]
    assert dead(detector, [(second, {"slow": 2}) for second in range(10, 14)])[-1] == ["slow"]


@pytest.mark.parametrize("jump_ms", [10**12, -(10**12)])
def test_jump_of_the_server_s_clock_makes_no_worker_dead(
    detector: FailureDetector, jump_ms: int
) -> None:
    looks = [(s, {"alive": 1000 * s + (jump_ms if s > 3 else 0)}) for s in range(20)]
    assert dead(detector, looks) == [[]] * 20


def test_new_detector_ignores_the_age_of_heartbeats(detector: FailureDetector) -> None:
    assert dead(detector, [(1e6, {"silent": 1})]) == [[]]


def test_gap_between_observations_restarts_all_expiries(detector: FailureDetector) -> None:
    looks = [(second, {"silent": 7}) for second in (0, 1, 2, 3, 4)]
    looks += [(second, {"silent": 7}) for second in (7, 8, 9, 10, 11, 12)]
    assert dead(detector, looks) == [[]] * 10 + [["silent"]]


def test_reset_restarts_all_expiries(detector: FailureDetector) -> None:
    for second in range(5):
        detector.observe({"silent": 7}, second)
    detector.reset()
    looks = [(second, {"silent": 7}) for second in range(5, 11)]
    assert dead(detector, looks) == [[]] * 5 + [["silent"]]


def test_worker_that_registers_again_counts_as_new(detector: FailureDetector) -> None:
    for second in range(3):
        detector.observe({"worker": 7}, second)
    detector.observe({}, 3)
    looks = [(second, {"worker": 7}) for second in range(4, 9)]
    assert dead(detector, looks) == [[]] * 5


def test_undisturbed_time_counts_from_the_last_interruption(detector: FailureDetector) -> None:
    detector.observe({}, 0)
    assert detector.undisturbed_s(0) == float("inf")
    detector.reset()
    assert detector.undisturbed_s(1) == 0
    detector.observe({}, 2)
    detector.observe({}, 3)
    assert detector.undisturbed_s(3) == 1
    detector.observe({}, 30)
    assert detector.undisturbed_s(30) == 0


def test_each_worker_has_its_own_expiry(detector: FailureDetector) -> None:
    found = [
        detector.observe({"short": 1, "long": 1, "silent": 1}, second, {"short": 2, "long": 8})
        for second in range(9)
    ]
    first = {name: next(s for s in range(9) if (name, 1) in found[s]) for name, _ in found[8]}
    assert first == {"short": 2, "silent": 5, "long": 8}


# Heartbeats


class Scripts:
    """Scripts that Redis runs, with the test's answers."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.times: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}

    def run(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        self.ran.append((name, *args))
        if isinstance(answer := self.answers.get(name), Exception) and "w2" in args:
            raise answer
        return answer


class Scene:
    """The heartbeat of the worker `w1`, whose lease store and Redis are the test's."""

    store: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scripts = Scripts()
        monkeypatch.setattr(membership, "transport_scripts", lambda _: self.scripts)
        self.flushes = 0
        #: What Redis knows of workers.
        self.infos: dict[str, bytes] = {}
        self.store = SimpleNamespace(
            worker="w1",
            describe=lambda leased, scheduled: f"about w1 {dict(leased)} {scheduled}",
            leases=Leases(),
            keys=Keys(),
            scripts=self.scripts,
            recovered=0,
            expiry_s=EXPIRY_S,
            fenced=False,
            is_open=True,
            holder="channel",
            flush=self._flush,
        )
        client: Any = self
        self.asked: list[str] = []
        self.heartbeat = Heartbeat(self.store, client)

    def _flush(self) -> None:
        self.flushes += 1

    def hmget(self, key: str, workers: Sequence[str]) -> list[bytes | None]:
        self.asked += workers
        return [self.infos.get(worker) for worker in workers]

    def hget(self, key: str, worker: str) -> bytes | None:
        return self.infos.get(worker)

    def beat(self, now_s: float, **others: int) -> None:
        beats: list[Any] = [b"w1", b"1"]
        for worker, beat in others.items():
            beats += [worker.encode(), b"%d.0" % beat]
        self.scripts.answers["renew"] = beats
        self.heartbeat.beat(now_s)

    @property
    def recovered(self) -> list[list[Any]]:
        """Worker, heartbeat, and whether its death counts, of each recovery."""
        return [args for name, *args in self.scripts.ran if name == "recover"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_heartbeat_renews_the_worker_and_sends_what_waits(scene: Scene) -> None:
    scene.beat(0.0)
    assert scene.scripts.ran == [("renew", "w1", "about w1 {} 0")]
    assert scene.flushes == 1
    assert scene.store.beat_s is not None


def test_heartbeat_says_how_much_of_each_queue_the_worker_holds(scene: Scene) -> None:
    owner: Any = None
    for token, key in (("1", "embed"), ("2", "embed\x06\x163"), ("3", "celery")):
        scene.store.leases.take(token, owner, key)
    scene.beat(0.0)
    assert scene.scripts.ran == [("renew", "w1", "about w1 {'embed': 2, 'celery': 1} 0")]


def test_jobs_of_a_silent_worker_are_recovered_once_it_is_dead(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.scripts.answers["recover"] = (3, 0)
    scene.infos = {"w2": b'{"name": "w2@host"}'}
    for second in range(int(EXPIRY_S) + 1):
        scene.beat(float(second), w2=7, w3=second)
    assert scene.recovered == [["w2", 7, 1]]
    assert scene.store.recovered == 3
    assert "worker w2@host is dead; its jobs are back in their queues: 3" in caplog.text
    assert membership.CAUTION not in caplog.text


def test_suspects_of_a_dead_worker_are_announced_unless_another_worker_was_first(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(int(EXPIRY_S) + 1):
        scene.beat(float(second), w2=7)
    assert caplog.text == ""
    scene.scripts.answers["recover"] = (3, 2)
    scene.beat(EXPIRY_S + 1, w2=7)
    assert "worker w2 is dead; its jobs are back in their queues: 3; 2 were on" in caplog.text


def test_worker_whose_jobs_cannot_go_back_keeps_nobody_else_from_being_recovered(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.scripts.answers["recover"] = ResponseError("no permission for key 'q'")
    for second in range(int(EXPIRY_S) + 2):
        scene.beat(float(second), w2=7)
    assert [worker for worker, *_ in scene.recovered] == ["w2", "w2"]
    assert caplog.text.count("worker w2 is dead, and its jobs cannot go back") == 1
    assert "no permission for key 'q'" in caplog.text


def test_expiry_of_another_worker_is_asked_for_once_and_is_its_own(scene: Scene) -> None:
    scene.infos = {"w2": b'{"expiry_s": 2}'}
    for second in range(4):
        scene.beat(float(second), w2=7, w3=7)
    assert scene.asked == ["w2", "w3"]
    assert [worker for worker, *_ in scene.recovered] == ["w2", "w2"]
    # It went, and another one has its id.
    scene.beat(4.0)
    scene.beat(5.0, w2=8)
    assert scene.asked == ["w2", "w3", "w2"]


@pytest.mark.parametrize(("undisturbed_s", "counts"), [(2 * EXPIRY_S, 1), (2 * EXPIRY_S - 1, 0)])
def test_death_counts_only_if_all_was_quiet_for_twice_the_expiry(
    scene: Scene, undisturbed_s: float, counts: int
) -> None:
    scene.heartbeat._detector.reset()
    for second in range(int(undisturbed_s) + 1):
        silent = second >= undisturbed_s - EXPIRY_S
        scene.beat(float(second), w2=1000 if silent else second)
    assert scene.recovered == [["w2", 1000, counts]]


def test_worker_that_redis_does_not_know_is_fenced_unless_it_is_closing(scene: Scene) -> None:
    scene.heartbeat.beat(0.0)
    assert scene.store.fenced
    assert scene.flushes == 0
    # A fenced worker sends none, until it has begun anew.
    scene.scripts.ran.clear()
    scene.heartbeat.beat(1.0)
    assert scene.scripts.ran == []
    scene.store.fenced = scene.store.is_open = False
    scene.heartbeat.beat(2.0)
    assert not scene.store.fenced


def test_heartbeat_that_overlaps_with_a_new_registration_fences_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejoin(*_: Any) -> None:
        scene.store.worker = "w9"

    monkeypatch.setattr(scene.scripts, "run", rejoin)
    scene.heartbeat.beat(0.0)
    assert not scene.store.fenced


def test_worker_may_miss_some_heartbeats_before_it_counts_as_dead(scene: Scene) -> None:
    assert scene.heartbeat._pause_s == EXPIRY_S / 5


def test_gap_of_half_an_expiry_starts_all_observation_anew(scene: Scene) -> None:
    for now_s in (0.0, 2.0, 4.0, 6.6, 8.6, 10.6):
        scene.beat(now_s, w2=7)
    assert scene.recovered == []
    scene.beat(11.6, w2=7)
    assert [worker for worker, *_ in scene.recovered] == ["w2"]
