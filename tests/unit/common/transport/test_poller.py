"""When a worker asks for messages, with an event loop and without one."""

from collections.abc import Iterator
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from kombu.transport.redis import MultiChannelPoller

from batchery.transport import poller as module
from batchery.transport.poller import SWEEP_INTERVAL_S, Poller


class Channel:
    """A channel that leases, or one of kombu's."""

    _in_poll = None

    def __init__(self, *, leases: bool = True) -> None:
        self.lease_store: Any = self if leases else None
        self.inbox = SimpleNamespace(count=0)
        self.calls: list[str] = []
        self.refusal: Exception | None = None

    def look_for_room(self) -> None:
        self.calls.append("look")

    def sweep(self) -> None:
        self.calls.append("sweep")

    def flush(self) -> None:
        self.calls.append("flush")
        if self.refusal is not None:
            raise self.refusal

    def read_push(self) -> None:
        self.calls.append("push")


class Scene:
    """A poller whose waiting is kombu's part, which the test stands for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(module, "monotonic", lambda: self.now_s)
        self.poller: Any = Poller()
        #: How long each wait may take, and what comes meanwhile: None for nothing.
        self.waits_s: list[float | None] = []
        self.comes: Any = None
        self.stock: list[str] = []
        monkeypatch.setattr(MultiChannelPoller, "get", self._get)
        monkeypatch.setattr(
            MultiChannelPoller, "on_poll_start", lambda _: self.stock.append("start")
        )
        monkeypatch.setattr(MultiChannelPoller, "on_readable", lambda *_: self.stock.append("read"))

    def _get(self, callback: Any, timeout: float | None = None) -> None:
        self.waits_s.append(timeout)
        if self.comes is None:
            raise Empty
        self.comes()

    def add(self, channel: Channel) -> Channel:
        self.poller._channels.add(channel)
        return channel


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.poller.close()


def test_channels_that_lease_look_for_room_before_the_loop_waits(scene: Scene) -> None:
    leasing, plain = scene.add(Channel()), scene.add(Channel(leases=False))
    scene.poller.on_poll_start()
    scene.poller.flush()
    assert leasing.calls == ["look", "flush"]
    assert plain.calls == []
    assert scene.stock == ["start"]
    scene.poller.sweep()
    assert [leasing.calls[-1], plain.calls] == ["sweep", ["sweep"]]


def test_refused_acknowledgement_is_a_lost_connection(scene: Scene) -> None:
    scene.add(Channel()).refusal = redis.ReadOnlyError("READONLY")
    with pytest.raises(redis.ConnectionError, match="refuses"):
        scene.poller.flush()


def test_push_that_nobody_asked_for_is_not_the_end_of_the_connection(scene: Scene) -> None:
    channel = scene.add(Channel())
    scene.poller._fd_to_chan[7] = (channel, "BRPOP")
    with pytest.raises(Empty):
        scene.poller.on_readable(7)
    assert channel.calls == ["push"]
    assert scene.stock == []


@pytest.mark.parametrize("case", ["asked", "listen", "plain", "paused", "unknown"])
def test_all_else_is_read_by_kombu(scene: Scene, case: str) -> None:
    channel: Any = scene.add(Channel(leases=case != "plain"))
    if case != "unknown":
        scene.poller._fd_to_chan[7] = (channel, "LISTEN" if case == "listen" else "BRPOP")
    if case == "asked":
        channel._in_poll = object()
    if case == "paused":
        scene.poller._paused_brpop[7] = (channel, None, None, None)
    scene.poller.on_readable(7)
    assert scene.stock == ["read"]
    assert channel.calls == []
    scene.poller._paused_brpop.clear()


# Without an event loop


@pytest.mark.parametrize(
    ("timeout_s", "expected_s"), [(None, SWEEP_INTERVAL_S), (9.0, SWEEP_INTERVAL_S), (0.1, 0.1)]
)
def test_wait_is_no_longer_than_the_time_between_two_sweeps(
    scene: Scene, timeout_s: float | None, expected_s: float
) -> None:
    channel = scene.add(Channel())
    with pytest.raises(Empty):
        scene.poller.get(None, timeout_s)
    assert scene.waits_s == [expected_s]
    assert channel.calls == ["flush"]
    scene.now_s += SWEEP_INTERVAL_S
    with pytest.raises(Empty):
        scene.poller.get(None, timeout_s)
    assert channel.calls == ["flush", "flush", "sweep"]
    # The next one is due a whole interval later.
    scene.now_s += SWEEP_INTERVAL_S / 2
    with pytest.raises(Empty):
        scene.poller.get(None, timeout_s)
    assert channel.calls.count("sweep") == 1


def test_channels_of_kombu_s_alone_wait_as_kombu_does(scene: Scene) -> None:
    channel = scene.add(Channel(leases=False))
    with pytest.raises(Empty):
        scene.poller.get(None, None)
    assert (scene.waits_s, channel.calls) == ([None], [])


def test_messages_that_came_while_a_connection_was_made_count_as_an_event(scene: Scene) -> None:
    channel = scene.add(Channel())

    def hand_over() -> None:
        channel.inbox.count += 1
        raise Empty

    scene.comes = hand_over
    scene.poller.get(None, 0.1)
    scene.add(Channel(leases=False)).inbox.count = 99
    scene.comes = None
    with pytest.raises(Empty):
        scene.poller.get(None, 0.1)


def test_wait_is_ended_by_a_wake_and_an_old_wake_ends_no_wait(scene: Scene) -> None:
    scene.add(Channel())
    # Nobody waits yet.
    scene.poller.wake()
    scene.comes = lambda: None
    scene.poller.get(None, None)
    waker, _ = scene.poller._waker
    scene.poller.wake()
    assert waker.recv(16, 0) == b"\0"
    scene.poller.wake()
    scene.poller.get(None, None)
    assert scene.poller._waker[0] is waker
    with pytest.raises(BlockingIOError):
        waker.recv(16)


def test_closed_poller_leaves_no_socket_open(scene: Scene) -> None:
    scene.poller.close()
    scene.add(Channel())
    scene.comes = lambda: None
    scene.poller.get(None, None)
    ends = scene.poller._waker
    scene.poller.close()
    assert [end.fileno() for end in ends] == [-1, -1]
    assert scene.poller._waker is None
    scene.poller.wake()
