from typing import Any

from batchery_producer.gateway.monitor import DeviceFigures, in_gb, read_figures

MEMORY = {"allocated_bytes": 2**30, "peak_bytes": 2**31}


def worker(queue: str, **devices: Any) -> dict[str, Any]:
    return {"queues": [queue], "devices": devices}


def test_memory_of_all_ready_devices_of_the_queue_is_added() -> None:
    ready = {"state": "ready", "memory": MEMORY}
    workers = {
        "a": worker("mood", cuda0=ready, cuda1={"state": "starting", "memory": MEMORY}),
        "b": worker("mood", cuda0=ready),
        "c": worker("other", cuda2=ready),
        "d": {"error": "runs no batches"},
    }
    found = read_figures(workers, "mood")
    assert found == DeviceFigures(("cuda0",), 2 * 2**30, 2 * 2**31)
    assert in_gb(found.allocated_bytes) == 2.0


def test_cpu_has_no_memory_of_its_own() -> None:
    workers = {"a": worker("mood", cpu={"state": "ready", "memory": {}})}
    assert read_figures(workers, "mood") == DeviceFigures(("cpu",), None, None)
    assert in_gb(None) is None
