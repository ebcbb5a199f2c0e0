"""Frames over real socket pairs."""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.ipc.framing import Link, read_frame, write_frame

Frames = st.lists(st.binary(max_size=5_000), max_size=8)


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    link = Link(ours)
    yield link, theirs
    link.close()
    theirs.close()


def received(link: Link, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += link.receive()
    return frames


@settings(max_examples=60)
@given(frames=Frames, cuts=st.lists(st.integers(1, 700), min_size=1, max_size=20))
def test_frames_survive_any_fragmentation(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack(">Q", len(frame)) + frame for frame in frames)
    ours, theirs = socket.socketpair()
    link = Link(ours)
    found: list[bytes] = []
    start = turn = 0
    with theirs:
        while start < len(stream):
            end = start + cuts[turn % len(cuts)]
            theirs.sendall(stream[start:end])
            found += link.receive()
            start, turn = end, turn + 1
    assert found == frames
    with pytest.raises(EOFError):
        link.receive()
    link.close()


@settings(max_examples=30)
@given(frames=Frames)
def test_frames_that_the_parent_sends_arrive_whole_and_in_order(frames: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with theirs:
        for frame in frames:
            link.send(frame)
        for frame in frames:
            assert read_frame(theirs) == frame
            link.flush()
    link.close()


def test_a_full_pipe_does_not_block_and_is_flushed_later(
    pair: tuple[Link, socket.socket],
) -> None:
    link, theirs = pair
    frames = [bytes([number]) * 300_000 for number in range(8)]
    drained = [link.send(frame) for frame in frames]
    assert not drained[-1]
    for frame in frames:
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(read_frame, theirs)
            while not reading.done():
                link.flush()
            assert reading.result() == frame
    assert link.flush()


def test_a_huge_frame_arrives(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    frame = bytes(range(256)) * (50 * 4096)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_frame, theirs, frame)
        (found,) = received(link, 1)
        writing.result()
    assert found == frame


def test_end_of_file_is_raised_after_the_last_complete_frame(
    pair: tuple[Link, socket.socket],
) -> None:
    link, theirs = pair
    write_frame(theirs, b"one")
    write_frame(theirs, b"two")
    theirs.sendall(struct.pack(">Q", 100) + b"cut short")
    theirs.close()
    assert link.receive() == [b"one", b"two"]
    for _ in range(2):
        with pytest.raises(EOFError):
            link.receive()


def test_frames_for_a_dead_process_are_dropped(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    assert not link.send(bytes(3_000_000))
    theirs.close()
    assert link.flush()
    assert link.send(b"more")
    with pytest.raises(EOFError):
        link.receive()
