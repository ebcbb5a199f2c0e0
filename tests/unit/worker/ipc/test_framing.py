"""Frames over real socket pairs."""

import queue
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.ipc.framing import Pipe, read_frame, write_frame
from support.patience import TIMEOUT_S

Frames = st.lists(st.binary(min_size=1, max_size=5_000), max_size=8)


class Parent:
    """A pipe with what has come by it; None for its end."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(TIMEOUT_S)
        self.came: queue.Queue[bytes | None] = queue.Queue()
        self.pipe = Pipe(ours, lambda _, frame: self.came.put(frame), lambda _: self.came.put(None))

    def read(self) -> bytes | None:
        return self.came.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        self.pipe.close()
        self.theirs.close()


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.close()


@settings(max_examples=60, deadline=None)
@given(frames=Frames, cuts=st.lists(st.integers(1, 700), min_size=1, max_size=20))
def test_frames_survive_any_fragmentation(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack(">Q", len(frame)) + frame for frame in frames)
    parent = Parent()
    start = turn = 0
    with parent.theirs:
        while start < len(stream):
            end = start + cuts[turn % len(cuts)]
            parent.theirs.sendall(stream[start:end])
            start, turn = end, turn + 1
    assert [parent.read() for _ in (*frames, None)] == [*frames, None]


@settings(max_examples=30, deadline=None)
@given(frames=Frames)
def test_frames_that_the_parent_sends_arrive_whole_and_in_order(frames: list[bytes]) -> None:
    parent = Parent()
    for frame in frames:
        parent.pipe.send(frame)
    assert [read_frame(parent.theirs) for _ in frames] == frames
    parent.close()


def test_a_device_that_reads_nothing_holds_nobody_up(parent: Parent) -> None:
    frames = [bytes([number + 1]) * 300_000 for number in range(8)]
    for frame in frames:
        parent.pipe.send(frame)
    assert [read_frame(parent.theirs) for _ in frames] == frames


def test_a_huge_frame_arrives(parent: Parent) -> None:
    frame = bytes(range(256)) * (50 * 4096)
    threading.Thread(target=write_frame, args=(parent.theirs, frame)).start()
    assert parent.read() == frame


def test_the_end_is_told_after_the_last_complete_frame(parent: Parent) -> None:
    write_frame(parent.theirs, b"one")
    write_frame(parent.theirs, b"two")
    parent.theirs.sendall(struct.pack(">Q", 100) + b"cut short")
    parent.theirs.close()
    assert [parent.read() for _ in range(3)] == [b"one", b"two", None]


def test_frames_for_a_dead_process_are_dropped(parent: Parent) -> None:
    parent.pipe.send(bytes(3_000_000))
    parent.theirs.close()
    assert parent.read() is None
    parent.pipe.send(b"more")


def test_whoever_closes_a_pipe_hears_of_its_end_though_nobody_reads_it(parent: Parent) -> None:
    parent.pipe.send(bytes(3_000_000))
    parent.pipe.close()
    assert parent.read() is None
