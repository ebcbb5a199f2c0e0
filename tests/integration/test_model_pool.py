"""More models than memory, and models on some devices only: with real workers."""

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as NoAnswer
from click.testing import CliRunner, Result

from apps import swapping
from batchery.cli.control import reload
from conftest import StartWorker
from support.harness import Worker, queue_length, wait_for
from support.patience import TIMEOUT_S, patient
from support.placed import list_placed
from support.steady_callers import SteadyCallers
from support.tiny_models import save_model

#: How long a worker may take to answer a command.
LOOK = ("--timeout", str(patient(1)))

NAMES = [f"bert{number}" for number in range(6)]


def send(client: Celery, name: str, item: Any) -> Any:
    return client.send_task(name, [item], queue=name)


def read_book(book: Path) -> list[list[str]]:
    return [line.split() for line in book.read_text().splitlines()] if book.exists() else []


def test_six_models_share_the_memory_of_two(
    start_worker: StartWorker, client: Celery, redis_url: str, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in NAMES}
    for number, folder in enumerate(folders.values()):
        save_model(folder, "bert", labels=[f"label{number}{each}" for each in "ab"])
    size = sum(path.stat().st_size for path in folders[NAMES[0]].glob("*.safetensors"))
    sections = [
        f'[models.{name}]\nkind = "classification"\nmodel = "{folder}"\n'
        for name, folder in folders.items()
    ]
    toml = f"model_memory_bytes = {int(2.5 * size)}\ndevices = ['cpu']\n"
    (tmp_path / "batchery.toml").write_text(toml + "".join(sections))
    chooser = random.Random(5)
    # All wait by the time that the worker comes: it would swap for each that came alone.
    jobs = [
        (name, send(client, name, f"the cat sat on mat {number}"))
        for number, name in enumerate(chooser.choices(NAMES, k=200))
    ]
    worker = start_worker("batchery.app", cwd=tmp_path)
    for name, job in jobs:
        assert job.get(timeout=TIMEOUT_S)["label"].startswith(f"label{name[-1]}")
    models = list(list_placed(swapping.app, "apps.swapping", redis_url).values())
    assert Counter(model["state"] for model in models) == {"loaded": 2, "not loaded": 4}
    assert {model["why"] for model in models} == {"all devices, first demand"}
    assert all(0.9 * size < model["held_bytes"] < 1.1 * size for model in models)
    # Two at the start, then at least each of the others once; far less often than they took turns.
    assert 6 <= sum(model["loads"] for model in models) < 60
    assert worker.log.count(" dropped on cpu for ") >= 4
    assert "out of memory" not in worker.log.lower()


def test_models_are_where_their_settings_say(
    start_worker: StartWorker, client: Celery, redis_url: str
) -> None:
    places = {
        "SWAP_DEVICES_ONE": "cpu:0",
        "SWAP_DEVICES_TWO": "cpu:1",
        "SWAP_DEVICES_THREE": "cpu:0",
    }
    start_worker("apps.swapping", env={"BATCHERY_DEVICES": "cpu:0,cpu:1", **places})
    jobs = [(name, send(client, name, number)) for number in range(40) for name in ("one", "two")]
    for name, job in jobs:
        found = job.get(timeout=TIMEOUT_S)
        assert (found["model"], found["device"]) == (name, {"one": "cpu:0", "two": "cpu:1"}[name])
    assert send(client, "three", 1).get(timeout=TIMEOUT_S)["device"] == "cpu:0"
    assert client.send_task("apps.swapping.shout", ["hi"]).get(timeout=TIMEOUT_S) == "HI"
    placed = list_placed(swapping.app, "apps.swapping", redis_url)
    assert {key: line["why"] for key, line in placed.items()} == {
        ("cpu:0", "one"): "devices",
        ("cpu:0", "three"): "devices",
        ("cpu:0", "large"): "all devices",
        ("cpu:1", "two"): "devices",
        ("cpu:1", "large"): "all devices",
    }


def start_swapping(start_worker: StartWorker, tmp_path: Path, **env: str) -> tuple[Worker, Path]:
    """A worker with memory for two of the small models, and the book of its loads."""
    book = tmp_path / "book"
    limit = {"BATCHERY_MODEL_MEMORY_BYTES": str(2 * swapping.HELD_BYTES)}
    gates = {"SWAP_BOOK": str(book), "SWAP_GATE": str(tmp_path / "gate")}
    queues = ("-Q", ",".join((*swapping.NAMES, "large")))
    worker = start_worker(
        "apps.swapping", *queues, env={"BATCHERY_DEVICES": "cpu", **limit, **gates, **env}
    )
    return worker, book


def test_kill_in_the_middle_of_a_swap_loses_no_job(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    worker, book = start_swapping(start_worker, tmp_path)
    assert send(client, "one", 0).get(timeout=TIMEOUT_S)["model"] == "one"
    gate = tmp_path / "gate-three"
    gate.touch()
    jobs = [(name, send(client, name, number)) for number in range(30) for name in swapping.NAMES]
    wait_for(lambda: any(line[0] == "three" for line in read_book(book)[3:]), "three is loading")
    (device,) = worker.devices()
    os.kill(device.pid, signal.SIGKILL)
    gate.unlink()
    for name, job in jobs:
        assert job.get(timeout=TIMEOUT_S)["model"] == name
    assert len({pid for _, _, pid in read_book(book)}) == 2


def order(name: str) -> Result:
    return CliRunner().invoke(reload, [name, "-A", "apps.swapping", *LOOK])


def test_models_above_the_limit_are_reloaded_under_load(
    start_worker: StartWorker, client: Celery, redis_url: str, tmp_path: Path
) -> None:
    worker, book = start_swapping(
        start_worker, tmp_path, SWAP_PINNED="one", SWAP_SIZES=str(tmp_path)
    )
    swapping.app.conf.update(broker_url=redis_url, result_backend=redis_url)

    def call() -> list[bool]:
        jobs = [
            (name, send(client, name, number)) for number in range(3) for name in swapping.NAMES
        ]
        return [job.get(timeout=TIMEOUT_S)["model"] == name for name, job in jobs]

    with SteadyCallers(call, threads=2) as callers:
        for name in swapping.NAMES:
            assert order(name).exit_code == 0
        callers.wait_more()
    assert all(callers.answers)
    (tmp_path / "two").write_text(str(2 * swapping.HELD_BYTES))
    done = order("two")
    assert done.exit_code == 1
    assert "not reloaded, two goes on as before: model 'two': needs 2.0 MiB" in done.output
    (tmp_path / "two").unlink()
    assert all(call())
    # The first process, one for each version, and one that had no place.
    assert len({pid for _, _, pid in read_book(book)}) == 5
    assert "Traceback" not in worker.log


def test_load_counts_for_no_time_limit(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    """A job with a hard limit comes while its model takes longer than that."""
    limit_s = int(patient(2))
    _, book = start_swapping(start_worker, tmp_path, BATCHERY_MAX_PASS_S=str(limit_s))
    gate = tmp_path / "gate-three"
    gate.touch()
    job = client.send_task("three", [1], queue="three", time_limit=limit_s)
    wait_for(lambda: any(line[0] == "three" for line in read_book(book)[3:]), "three is loading")
    with pytest.raises(NoAnswer):
        job.get(timeout=1.5 * limit_s)
    gate.unlink()
    assert job.get(timeout=TIMEOUT_S)["model"] == "three"
    assert len({pid for _, _, pid in read_book(book)}) == 1


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            {"SWAP_DEVICES_ONE": "cuda:7"},
            "model 'one': devices = ['cuda:7'], but this worker has cpu;",
        ),
        (
            {"SWAP_PINNED": "one,two,three"},
            "needs 1.0 MiB on cpu, and its models may have 2.0 MiB, of which pinned models hold 2",
        ),
    ],
)
def test_placement_that_is_impossible_ends_the_start(
    start_worker: StartWorker, tmp_path: Path, env: dict[str, str], text: str
) -> None:
    limit = {"BATCHERY_MODEL_MEMORY_BYTES": str(2 * swapping.HELD_BYTES)}
    worker = start_worker(
        "apps.swapping", ready=False, env={"BATCHERY_DEVICES": "cpu", **limit, **env}
    )
    assert worker.wait_exit() == 2
    lines = [line for line in worker.log.splitlines() if "CRITICAL" in line]
    assert len(lines) == 1
    assert text in lines[0]


def test_a_device_is_given_up_without_harm_to_others_and_the_last_one_ends_its_worker(
    start_worker: StartWorker, client: Celery, redis_url: str, tmp_path: Path
) -> None:
    places = {"BATCHERY_DEVICES": "cpu:0,cpu:1", "SWAP_DEVICES_TWO": "cpu:0,cpu:1"}
    worker, _ = start_swapping(start_worker, tmp_path, **places)
    worker.wait_answers(client)
    broken = tmp_path / "gate-broken-cpu:1"
    broken.touch()
    jobs = [send(client, "two", number) for number in range(40)]
    os.kill(find_devices(worker, client)["cpu:1"]["pid"], signal.SIGKILL)
    wait_for(lambda: "device cpu:1 is given up after 5 starts" in worker.log, "it is given up")
    # Its jobs go on where there is a device.
    assert {job.get(timeout=TIMEOUT_S)["model"] for job in jobs} == {"two"}
    state = find_devices(worker, client)["cpu:1"]
    assert (state["state"], "no such device" in state["error"]) == ("given up", True)
    (tmp_path / "gate-broken-cpu:0").touch()
    os.kill(find_devices(worker, client)["cpu:0"]["pid"], signal.SIGKILL)
    send(client, "two", 0)
    assert worker.wait_exit(TIMEOUT_S) == 2
    assert queue_length(redis_url, "two") == 1
    assert "no device is left, the last one was cpu:0" in worker.log


def find_devices(worker: Worker, client: Celery) -> dict[str, Any]:
    """What a worker says of its devices, by name."""
    found: dict[str, Any] = worker.inspect(client, "stats")["pool"]["devices"]
    return found
