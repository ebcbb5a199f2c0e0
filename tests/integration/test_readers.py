"""Items are read in processes beside the device, whatever becomes of these."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from batchery.media_settings import MediaSettings
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.media.reader import Reader, ReadItem
from batchery_worker.media.reading import MAX_FETCHED_BYTES, Readers
from support.harness import PYTHONPATH, command_line, wait_ended, wait_for
from support.patience import patient
from support.picture_host import PictureHost
from support.readers import OddReader, UnopenedReader

TIMEOUT_S = patient(60)

Open = Callable[..., Readers]


@pytest.fixture
def open_readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PYTHONPATH, os.environ["PYTHONPATH"]]))

    def start(kind: type[Reader] = OddReader, processes: int = 2, **given: Any) -> Readers:
        settings = ModelSettings(kind="image_embedding", model="any")
        media = MediaSettings(readers=processes, **given)
        opened.append(Readers({"see": kind(settings, media)}, None, media))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def read(readers: Readers, *texts: str) -> list[Any]:
    futures = [readers.submit("see", {"text": text}) for text in texts]
    return [each.result(TIMEOUT_S) for each in futures]


def list_processes() -> list[psutil.Process]:
    family = psutil.Process().children(recursive=True)
    return [each for each in family if "media.reader_process" in command_line(each)]


def test_an_item_is_read_in_another_process(open_readers: Open) -> None:
    (item,) = read(open_readers(), "a text")
    assert isinstance(item, ReadItem)
    pid = item.value.pop("pid")
    assert pid != os.getpid()
    assert item.value == {"data": "a text"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("die", "image: the processes that tried to read it have died"),
        ("raise", "text: cannot be read: no such number"),
        ("closure", "image: the processes that tried to read it have died"),
    ],
)
def test_what_ends_a_reader_fails_alone(open_readers: Open, text: str, problem: str) -> None:
    first, bad, *others = read(open_readers(), "a", text, "b", "c", "d")
    assert str(bad.exception) == problem
    assert all(isinstance(each, ReadItem) for each in (first, *others))


def test_what_hangs_fails_after_its_time_and_leaves_nothing(open_readers: Open) -> None:
    readers = open_readers(timeout_s=1)
    bad, good = read(readers, "hang", "a")
    assert str(bad.exception) == "image: took more than media.timeout_s = 1"
    assert isinstance(good, ReadItem)
    # Two readers, and the process that they were forked of.
    assert len(list_processes()) <= 3


def test_an_item_outlives_a_reader_that_was_killed_for_something_else(open_readers: Open) -> None:
    readers = open_readers(processes=1)
    (item,) = read(readers, "a")
    os.kill(item.value["pid"], signal.SIGKILL)
    (again,) = read(readers, "a")
    assert again.value["pid"] != item.value["pid"]


def test_readers_come_again_after_the_death_of_all_processes(open_readers: Open) -> None:
    readers = open_readers(processes=1)
    read(readers, "a")
    processes = list_processes()
    for each in processes:
        each.kill()
    wait_ended(processes)
    (item,) = read(readers, "b")
    assert isinstance(item, ReadItem)


def test_a_reader_that_cannot_be_opened_says_so_for_each_item(open_readers: Open) -> None:
    for each in read(open_readers(UnopenedReader), "a", "b"):
        assert isinstance(each, Failed)
        assert str(each.exception).endswith("has no image processor")


def test_what_is_fetched_at_a_time_is_bounded_in_bytes(open_readers: Open) -> None:
    with PictureHost(b"a picture") as host:
        # Of this size, two may be in memory.
        readers = open_readers(max_bytes=MAX_FETCHED_BYTES // 2, hosts=["127.0.0.1"])
        fetched = [readers.submit("see", {"image": host.url("/slow")}) for _ in range(6)]
        wait_for(lambda: host.slow >= 2, "as many are fetched as may be")
        # What comes with its message waits for nobody.
        assert all(isinstance(each, ReadItem) for each in read(readers, *"abcdef"))
        assert host.slow == 2
        host.gate.set()
        assert all(isinstance(each.result(TIMEOUT_S), ReadItem) for each in fetched)
        assert host.slow == 6


def test_processes_end_with_their_device(open_readers: Open) -> None:
    readers = open_readers()
    read(readers, "a", "b")
    processes = list_processes()
    readers.close()
    wait_ended(processes)


def test_nothing_is_started_again_for_what_is_read_at_the_end(open_readers: Open) -> None:
    readers = open_readers(processes=1)
    read(readers, "a")
    texts = ["hang", "b", "c"]
    futures = [readers.submit("see", {"text": text}) for text in texts]
    wait_for(lambda: futures[0].running(), "the first one is being read")
    readers.close()
    wait_for(lambda: all(each.done() for each in futures), "nobody waits for a reader")
    assert not list_processes()


def test_processes_outlive_the_signals_of_a_terminal(open_readers: Open) -> None:
    readers = open_readers(processes=1)
    read(readers, "a")
    for each in list_processes():
        for number in (signal.SIGINT, signal.SIGTERM):
            each.send_signal(number)
    (item,) = read(readers, "b")
    assert isinstance(item, ReadItem)
    wait_for(lambda: len(list_processes()) == 2, "both are alive")
