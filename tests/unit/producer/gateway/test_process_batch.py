"""Labels of texts, and the devices that made them."""

from batchery.protocol.figures import BatchFigures, DeviceSnapshot, MemorySnapshot, WorkerFigures
from batchery_producer.answers import BatchSummary, Outcome
from batchery_producer.gateway.process_batch import collect_batches, describe_devices, label


def test_batches_are_counted_once_whichever_texts_they_had() -> None:
    first, second = BatchSummary("b1", 2, 1.5, "cuda:1"), BatchSummary("b2", 1, 1.5, "cuda:0")
    batches = (first, first, second, None)
    outcomes = [Outcome(index, batch=batch) for index, batch in enumerate(batches)]
    assert collect_batches(outcomes) == {first, second}


def test_labels_have_the_place_of_their_text_in_the_request() -> None:
    value = {"tokens": 3, "label": "GOOD", "score": 0.75}
    assert label(["a"], [Outcome(0, value)], 16) == [
        {
            "text": "a",
            "sentiment": "GOOD",
            "confidence": 0.75,
            "token_count": 3,
            "processing_order": 16,
            "truncated": False,
        }
    ]


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
