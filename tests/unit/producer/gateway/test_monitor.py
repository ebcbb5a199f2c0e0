from batchery.protocol.figures import BatchFigures, DeviceSnapshot, MemorySnapshot, WorkerFigures
from batchery_producer.gateway.monitor import DeviceFigures, find_devices, in_gb

MEMORY = MemorySnapshot(allocated_bytes=2**30, peak_bytes=2**31)


def worker(queue: str, **devices: DeviceSnapshot) -> WorkerFigures:
    return WorkerFigures(devices, BatchFigures(), 1.0, queues=[queue])


def device(state: str, memory: MemorySnapshot = MEMORY) -> DeviceSnapshot:
    return DeviceSnapshot(state, 0, memory=memory)


def test_memory_of_all_ready_devices_of_the_queue_is_added() -> None:
    ready = device("ready")
    workers = {
        "a": worker("mood", cuda0=ready, cuda1=device("starting")),
        "b": worker("mood", cuda0=ready),
        "c": worker("other", cuda2=ready),
    }
    found = find_devices(workers, "mood")
    assert found == DeviceFigures(("cuda0",), 2 * 2**30, 2 * 2**31)
    assert in_gb(found.allocated_bytes) == 2.0


def test_cpu_has_no_memory_of_its_own() -> None:
    workers = {"a": worker("mood", cpu=device("ready", MemorySnapshot()))}
    assert find_devices(workers, "mood") == DeviceFigures(("cpu",), None, None)
    assert in_gb(None) is None
