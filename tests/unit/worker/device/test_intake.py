"""Batches are read by whoever has time: none is lost, and they keep their order."""

import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from batchery_worker.device.intake import _STOP, Intake
from support.harness import wait_for

Read = tuple[int, threading.Thread]


class Parent:
    """The other end of the pipe, and the device's intake with its thread."""

    def __init__(self, end: socket.socket, other: socket.socket) -> None:
        self.end = other
        self.reading = 0
        self.intake: Intake[Read] = Intake(end, self.prepare)
        threading.Thread(target=self.intake.run, daemon=True).start()

    def send(self, number: int) -> None:
        frame = str(number).encode()
        self.end.sendall(struct.pack(">Q", len(frame)) + frame)

    def prepare(self, frame: bytes) -> Read:
        self.reading += 1
        assert self.reading == 1
        time.sleep(0)
        self.reading -= 1
        return int(frame), threading.current_thread()


@pytest.fixture
def parent() -> Iterator[Parent]:
    one, other = socket.socketpair()
    # They stay open: at the end of the file the intake ends the process.
    yield Parent(one, other)
    kept.append((one, other))


kept: list[tuple[socket.socket, socket.socket]] = []


def test_lonely_batches_are_read_by_the_main_thread(parent: Parent) -> None:
    for number in range(5):
        later = threading.Timer(0.05, parent.send, (number,))
        later.start()
        assert parent.intake.take() == (number, threading.current_thread())
        later.join()


def test_batches_that_come_meanwhile_are_read_by_the_other_thread(parent: Parent) -> None:
    parent.send(1)
    assert parent.intake.take() == (1, threading.current_thread())
    parent.intake.read_ahead()
    parent.send(2)
    parent.send(3)
    wait_for(lambda: parent.intake._ready.qsize() == 2, "both are prepared")
    number, thread = parent.intake.take_arrived()
    assert number == 2
    assert thread is not threading.current_thread()
    assert not parent.intake.is_empty
    assert parent.intake.take()[0] == 3
    # The other one reads until this one waits.
    parent.send(4)
    assert parent.intake.take()[0] == 4
    assert parent.intake.is_empty


def test_a_thread_that_does_not_wait_sees_what_has_arrived(parent: Parent) -> None:
    intake = parent.intake
    assert intake.is_empty
    with pytest.raises(queue.Empty):
        intake.take_arrived()
    parent.send(1)
    assert not intake.is_empty
    assert intake.take_arrived() == (1, threading.current_thread())


@pytest.mark.parametrize("seed", range(3))
def test_batches_keep_their_order_whoever_reads_them(parent: Parent, seed: int) -> None:
    chance = random.Random(seed)
    count = 2000
    pauses_s = [chance.choice((0, 0, 0, 1e-5, 1e-4, 1e-3)) for _ in range(2 * count)]

    def send() -> None:
        for number in range(count):
            parent.send(number)
            time.sleep(pauses_s[number])

    sender = threading.Thread(target=send)
    sender.start()
    taken, readers = [], set()
    for number in range(count):
        batch, reader = parent.intake.take()
        taken.append(batch)
        readers.add(reader)
        if chance.random() < 0.5:
            parent.intake.read_ahead()
        time.sleep(pauses_s[count + number])
    sender.join()
    assert taken == list(range(count))
    assert len(readers) == 2


def test_what_is_no_batch_is_handled_and_passed_over() -> None:
    one, other = socket.socketpair()
    kept.append((one, other))
    seen: list[bytes] = []

    def prepare(frame: bytes) -> int | None:
        seen.append(frame)
        return None if frame == b"order" else int(frame)

    def send(frame: bytes) -> None:
        other.sendall(struct.pack(">Q", len(frame)) + frame)

    intake: Intake[int] = Intake(one, prepare)
    threading.Thread(target=intake.run, daemon=True).start()
    for frame in (b"order", b"1", b"order"):
        send(frame)
    assert intake.take() == 1
    with pytest.raises(queue.Empty):
        intake.take_arrived()
    assert seen == [b"order", b"1", b"order"]
    intake.read_ahead()
    send(b"order")
    send(b"2")
    wait_for(lambda: len(seen) == 5, "the other thread has read them")
    assert intake.take() == 2


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_end_of_the_pipe_reaches_the_main_thread_once_it_waits(
    ends: list[int], reads_ahead: bool, half: bool
) -> None:
    one, other = socket.socketpair()
    intake: Intake[int] = Intake(one, int)
    helper = threading.Thread(target=intake.run, daemon=True)
    helper.start()
    other.sendall(struct.pack(">Q", 1) + b"1")
    assert intake.take() == 1
    if reads_ahead:
        intake.read_ahead()
    if half:
        other.shutdown(socket.SHUT_WR)
    else:
        other.close()
    # A batch that runs does not hear of it: its function might take the error for its own.
    with pytest.raises(queue.Empty):
        intake.take_arrived()
    with pytest.raises(EOFError):
        intake.take()
    assert intake.closed.is_set()
    other.close()
    helper.join(10)
    assert not helper.is_alive()
    assert ends == []
    one.close()


def test_end_of_the_pipe_may_come_as_the_other_thread_has_just_stopped(ends: list[int]) -> None:
    one, other = socket.socketpair()
    intake: Intake[int] = Intake(one, int)
    helper = threading.Thread(target=intake.run, daemon=True)
    helper.start()
    intake.read_ahead()
    # What `take` does first; this thread is slow to see that it has been obeyed.
    os.write(intake._notify, _STOP)
    wait_for(lambda: not intake._stopped.locked(), "the other thread has stopped")
    other.close()
    time.sleep(0.1)
    with pytest.raises(EOFError):
        intake.take()
    helper.join(10)
    assert not helper.is_alive()
    assert ends == []
    one.close()


def test_process_ends_soon_where_the_main_thread_is_busy(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery_worker.device.intake.LEAVE_S", 0.01)
    one, other = socket.socketpair()
    intake: Intake[int] = Intake(one, int)
    helper = threading.Thread(target=intake.run, daemon=True)
    helper.start()
    other.close()
    helper.join(10)
    assert not helper.is_alive()
    assert ends == [0]
    one.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr("batchery_worker.device.intake.os._exit", codes.append)
    return codes
