"""The worker as its operator sees it: start, refusals, control, what it costs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from apps import ordinary, shop
from conftest import StartWorker
from support.harness import START_S, TESTS, Worker, device_busy, kill_all
from support.patience import TIMEOUT_S, patient

#: An app that knows another Redis, where none answers.
PLACED = """
from celery import Celery
from batchery import BatchTask, install

nowhere = "redis://127.0.0.1:1/0"
app = install(Celery("placed", broker=nowhere, backend=nowhere, set_as_current=False))


@app.task(base=BatchTask, name="shout", shared=False)
def shout(texts):
    return [text.upper() for text in texts]
"""

SERVE = """
import sys
from placed import app

app.conf.update(broker_url=sys.argv[1], result_backend=sys.argv[1])
app.worker_main(["worker", "-c", "1", "-l", "INFO"])
"""


@pytest.fixture(autouse=True)
def _apps(redis_url: str) -> None:
    for module in (shop, ordinary):
        module.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def test_ping_is_answered_while_a_forward_pass_takes_ten_seconds(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker, gate = start_worker("apps.shop"), tmp_path / "gate"
    began_s = time.monotonic()
    with device_busy(worker, shop.app, shop.until.name, gate) as job:
        while time.monotonic() < began_s + 10:
            assert shop.app.control.ping([worker.name], timeout=60, limit=1)
            time.sleep(0.2)  # Without, the pings keep both processors busy.
        assert not job.ready()
    assert job.get(timeout=TIMEOUT_S) == str(gate)


def test_an_app_without_batch_tasks_starts_no_device(start_worker: StartWorker) -> None:
    worker = start_worker("apps.ordinary")
    assert ordinary.double.delay(4).get(timeout=TIMEOUT_S) == 8
    assert worker.devices() == []


def test_jobs_run_on_a_broker_without_an_event_loop(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    program = (
        "from apps import shop\n"
        "app = shop.app\n"
        "queue = {'data_folder_in': 'out', 'data_folder_out': 'out', 'control_folder': 'out'}\n"
        "app.conf.update(broker_url='filesystem://', result_backend='file://out',\n"
        "    broker_transport_options=queue)\n"
    )
    (tmp_path / "files.py").write_text(program)
    worker = Worker(tmp_path, "", "files", env={"CELERY_BROKER_URL": "", "PYTHONPATH": f"{TESTS}"})
    try:
        worker.wait_ready()
        client = (
            "import files, time\n"
            "jobs = files.shop.read_batch.submit_many(range(5))\n"
            f"print([job.get(timeout={TIMEOUT_S}, interval=0.05)['item'] for job in jobs])\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", client],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{tmp_path}"},
            capture_output=True,
            text=True,
            timeout=patient(150),
            check=False,
        )
        assert done.stdout == "[0, 1, 2, 3, 4]\n", done.stderr + worker.log
        assert worker.stop() == 0
    finally:
        worker.kill()


def test_an_app_that_lives_in_main_is_one_line(tmp_path: Path, redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "apps" / "broken_main.py")],
        cwd=tmp_path,
        env={**os.environ, "CELERY_BROKER_URL": redis_url, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    # Celery's `worker_main` keeps the exit code to itself.
    assert "is defined in __main__, so a device process cannot import it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_may_say_where_redis_is_before_it_starts_a_worker(
    tmp_path: Path, redis_url: str, client: Celery
) -> None:
    (tmp_path / "placed.py").write_text(PLACED)
    (tmp_path / "serve.py").write_text(SERVE)
    known = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND")
    worker = subprocess.Popen(
        [sys.executable, "serve.py", redis_url],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in known},
    )
    try:
        assert client.send_task("shout", ["hello"]).get(timeout=START_S) == "HELLO"
    finally:
        kill_all(worker)


@pytest.mark.parametrize(
    ("option", "error"),
    [("--soft-time-limit", SoftTimeLimitExceeded), ("--time-limit", TimeLimitExceeded)],
)
def test_limits_of_the_command_line_are_for_tasks_without_their_own(
    start_worker: StartWorker, option: str, error: type[Exception]
) -> None:
    start_worker("apps.shop", option, "1")
    with pytest.raises(error):
        shop.nap.delay(60.0).get(timeout=TIMEOUT_S)


def test_batches_fill_where_celery_prefetches_nothing(start_worker: StartWorker) -> None:
    start_worker("apps.shop", "-c", "1", "--disable-prefetch")
    assert shop.patient.submit_many(range(8)).get(timeout=TIMEOUT_S) == [8] * 8


def test_the_main_process_stays_small_and_never_imports_torch(
    start_worker: StartWorker, tmp_path: Path, model_toml: str, client: Celery
) -> None:
    (tmp_path / "batchery.toml").write_text(model_toml)
    worker = start_worker("batchery.app")
    for _ in range(3):
        jobs = [client.send_task("embed", [f"text {n}"], queue="embed") for n in range(50)]
        for job in jobs:
            job.get(timeout=TIMEOUT_S)
    main = psutil.Process(worker.pid)
    libraries = {Path(each.path).name for each in main.memory_maps()}
    assert not any("torch" in name for name in libraries)
    assert main.memory_info().rss < 150 * 2**20


def test_a_device_has_what_the_environment_says_and_else_few_compiled_programs(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("apps.shop", env={"GOMP_SPINCOUNT": "7"})
    (device,) = worker.devices()
    environment = device.environ()
    assert environment["GOMP_SPINCOUNT"] == "7"
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(8 * (os.cpu_count() or 1))
