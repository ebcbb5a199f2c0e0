"""One worker with many devices: each of them has work while there is some."""

from pathlib import Path

from apps import leases
from conftest import StartWorker
from support.harness import wait_for
from support.patience import patient

#: Twice as many as the batches that a worker with one device holds.
DEVICES = 6

BATCH_SIZE = leases.batch.max_batch_size or 0


def test_every_device_has_a_batch_while_jobs_wait(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    leases.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    names = ",".join(f"cpu:{index}" for index in range(DEVICES))
    # A worker that stands still for a while is no dead one: each job runs once.
    env = {"BATCHERY_DEVICES": names, "LEASE_EXPIRY_S": "600"}
    worker = start_worker("apps.leases", "-c", "1", env=env)
    assert len(worker.devices()) == DEVICES
    book, gate = tmp_path / "book", tmp_path / "gate"
    options = {"book": str(book), "gate": str(gate)}
    jobs = leases.batch.submit_many(range(DEVICES * BATCH_SIZE), options)
    # No batch ends before the gate opens, so each line is of another device or of its batch.
    wait_for(
        lambda: book.exists() and len(book.read_text().split()) == DEVICES * BATCH_SIZE,
        "all devices compute",
    )
    gate.touch()
    assert jobs.get(timeout=patient(60)) == list(range(DEVICES * BATCH_SIZE))
