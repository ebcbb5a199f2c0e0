"""The devices that label texts."""

from batchery.protocol.figures import BatchFigures, DeviceSnapshot, MemorySnapshot, WorkerFigures
from batchery_producer.gateway.process_batch import describe_devices


def test_memory_of_all_ready_devices_of_the_queue_is_added() -> None:
    gpu = MemorySnapshot(allocated_bytes=2**30, peak_bytes=2**31)

    def worker(queue: str, memory: MemorySnapshot, **states: str) -> WorkerFigures:
        devices = {name: DeviceSnapshot(state, 0, memory=memory) for name, state in states.items()}
        return WorkerFigures(devices, BatchFigures(), 1.0, queues=[queue])

    workers = {
        "a": worker("mood", gpu, cuda0="ready", cuda1="starting"),
        "b": worker("mood", gpu, cuda0="ready"),
        "c": worker("other", gpu, cuda2="ready"),
        "d": worker("plain", MemorySnapshot(), cpu="ready"),
    }
    assert describe_devices(workers, "mood") == ("cuda0", 2.0, 4.0)
    assert describe_devices(workers, "plain") == ("cpu", None, None)
    assert describe_devices(workers, "nobody's") == (None, None, None)
