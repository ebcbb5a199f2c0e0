"""Figures as families of metrics for Prometheus: of one worker, and of a whole cluster.

docs/metrics.md lists them all. It needs prometheus_client, which the extra `metrics` brings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from batchery.cli.survey import Survey
from batchery.protocol.figures import (
    SIZE_BOUNDS,
    TOKEN_BOUNDS_S,
    WAIT_BOUNDS_S,
    BatchFigures,
    DeviceSnapshot,
    WorkerFigures,
)

#: Figures of workers, by name.
Workers = Mapping[str, WorkerFigures]

#: A figure of a thing: by a function, or by the path of its attribute. It is None where a part of
#: the path is, as of an older worker. Milliseconds and KiB become seconds and bytes.
Read = str | Callable[[Any], float | None]

STAGES = ("prepare", "queued", "forward", "commit")

#: How items of cached tasks got their results -> the figure that counts it.
CACHED = {"hit": "hits", "deduplicated": "deduplicated", "computed": "computed"}

#: Of each task: the name, what it is of, its bounds, and where the counts and their sum are.
HISTOGRAMS: Sequence[tuple[str, str, Sequence[float], str, str, str]] = (
    ("batch_size", "Items of a batch.", SIZE_BOUNDS, "tasks", "batch_sizes", "items"),
    ("queue_wait_seconds", "Until a batch left.", WAIT_BOUNDS_S, "tasks", "waits", "waited_s"),
    (
        *("first_token_seconds", "From sending a job to its first token.", WAIT_BOUNDS_S),
        *("texts", "first_tokens", "first_tokens_s"),
    ),
    ("token_seconds", "Between two tokens.", TOKEN_BOUNDS_S, "texts", "pauses", "pauses_s"),
)

#: How prometheus_client spells a bound.
_write: Callable[[float], str] = floatToGoString

#: What has one value for each thing of a kind; a name that ends in `_total` is a counter.
TABLE: Mapping[tuple[str, ...], Sequence[tuple[str, str, Read]]] = {
    ("task",): (
        ("batches_total", "Batches that ran.", "batches"),
        ("items_total", "Items that ran.", "items"),
        ("tokens_total", "Tokens of these items.", "tokens"),
        ("computed_tokens_total", "Tokens with padding.", "computed_tokens"),
        ("forward_seconds_total", "Time in forward passes.", "forward_ms"),
    ),
    ("worker",): (
        ("worker_live", "Whether /livez says so.", "health.live"),
        ("worker_ready", "Whether /readyz says so.", "health.ready"),
        ("worker_start_time_seconds", "When it was started.", "health.started_at_s"),
        ("worker_waiting_jobs", "Jobs that wait for a device.", "waiting"),
        ("leases_held", "Messages that it holds.", "leases.held"),
        ("leases_recovered_total", "Messages of dead workers put back.", "leases.recovered"),
        ("redis_round_trips_total", "Fetches and scripts.", "leases.round_trips"),
        ("device_restarts_total", "Device processes that died.", "batches.device_restarts"),
    ),
    ("worker", "device"): (
        ("device_batches_total", "Batches that ran.", "done.batches"),
        ("device_items_total", "Items that ran.", "done.items"),
        ("device_tokens_total", "Tokens of these items.", "done.tokens"),
        ("device_computed_tokens_total", "Tokens with padding.", "done.computed_tokens"),
        ("device_forward_seconds_total", "Time in passes.", "done.forward_ms"),
        ("device_ready", "Whether it takes batches.", lambda device: device.state == "ready"),
        ("device_batches_in_flight", "Batches that it holds.", "batches_in_flight"),
        ("device_oldest_batch_seconds", "How long its oldest batch runs.", "oldest_batch_s"),
        ("device_resident_memory_bytes", "Main memory of its process.", "resident_kib"),
        ("device_memory_bytes", "Memory that torch holds.", "memory.reserved_bytes"),
        ("device_memory_size_bytes", "All memory of the GPU.", "memory.total_bytes"),
    ),
    ("worker", "device", "model"): (
        ("model_batch_tokens", "Token budget.", lambda model: model.max_batch_tokens or None),
        ("model_flops_total", "FLOPs without padding.", lambda model: model.flops or None),
        ("model_out_of_memory_total", "Passes without memory.", "out_of_memory"),
        ("model_loaded", "Whether it is loaded.", lambda model: model.state == "loaded"),
        ("model_loads_total", "Loads, also from main memory.", lambda model: model.loads or None),
        ("model_load_seconds", "How long the last load took.", "load_s"),
        ("model_memory_bytes", "Memory that it takes there.", "held_bytes"),
        ("model_slots", "Items that may run at once.", lambda model: model.slots or None),
        ("model_slots_taken", "Items that run.", lambda model: _slotted(model, "slots_taken")),
        ("model_steps_total", "Steps of the model.", lambda model: _slotted(model, "steps")),
    ),
    # Of the cluster.
    (): (
        ("workers", "That answered.", lambda all_: len(all_.figures) if all_.is_asked else None),
        ("scheduled_jobs", "Held until their time.", "scheduled"),
        ("dead_letters", "Dead letters.", "dead_letters"),
        ("redis_memory_used_bytes", "What its data take.", "memory.used_bytes"),
        ("redis_memory_max_bytes", "Its maxmemory; 0: none.", "memory.max_bytes"),
        ("redis_evicted_keys_total", "Keys thrown away to make room.", "memory.evicted_keys"),
    ),
}


def _slotted(model: Any, name: str) -> float | None:
    """A figure that only a model with slots has."""
    return getattr(model, name) if model.slots else None


def _read(thing: Any, read: Read) -> float | None:
    if not isinstance(read, str):
        return read(thing)
    for name in read.split("."):
        thing = getattr(thing, name, None)
    scale = {"_ms": 1e-3, "kib": 1024}.get(read[-3:], 1)
    return None if thing is None else thing * scale


def _family(name: str, text: str, labels: Sequence[str], rows: Iterable[Sequence[Any]]) -> Metric:
    """A counter or gauge with rows of values: of its labels, then its own."""
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family: Any = kind(name, text, labels=labels)
    for *values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    made: Metric = family
    return made


def _collect(
    labels: tuple[str, ...], things: Iterable[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """All families of a part of the table, with each thing behind the values of its labels."""
    known = list(things)
    for name, text, read in TABLE[labels]:
        rows = [(*values, _read(thing, read)) for values, thing in known]
        yield _family(f"batchery_{name}", text, labels, rows)


# Of workers


def collect_sums(batches: BatchFigures) -> Iterator[Metric]:
    """What one worker has counted, without its name: workers can be added up."""
    tasks, texts = batches.tasks.items(), batches.texts.items()
    yield from _collect(("task",), [((name,), task) for name, task in tasks])
    ended = [(name, *each) for name, task in tasks for each in task.outcomes.items()]
    times = [(stage, getattr(batches, f"{stage}_ms") / 1e3) for stage in STAGES]
    cached = [
        (task, result, getattr(cache, name))
        for task, cache in batches.caches.items()
        for result, name in CACHED.items()
    ]
    tokens = [
        (name, *each)
        for name, text in texts
        for each in (("input", text.tokens_in), ("output", text.tokens_out))
    ]
    traced, failed = batches.tracer_jobs.items(), batches.failures.items()
    for name, text, labels, rows in (
        ("jobs", "Jobs that ended.", ("task", "outcome"), ended),
        ("stage_seconds", "Time of batches.", ("stage",), times),
        ("tracer_jobs", "Jobs that Celery's tracer ended.", ("reason",), traced),
        ("failures", "Failed jobs and items.", ("error",), failed),
        ("cache_items", "Items of cached tasks.", ("task", "result"), cached),
        ("text_tokens", "Tokens of prompts and texts.", ("task", "type"), tokens),
    ):
        yield _family(f"batchery_{name}_total", text, labels, rows)
    for name, text, bounds, kind, counts, total in HISTOGRAMS:
        made = HistogramMetricFamily(f"batchery_{name}", text, labels=["task"])
        for task, each in getattr(batches, kind).items():
            known: Mapping[float, int] = getattr(each, counts)
            # A bucket counts all up to its bound.
            up_to = [(_write(b), sum(n for at, n in known.items() if at <= b)) for b in bounds]
            made.add_metric([task], up_to, getattr(each, total))
        yield made


def collect_workers(workers: Workers) -> Iterator[Metric]:
    """What is of each worker alone, of its models and its scripts."""
    yield from _collect(("worker",), [((name,), figures) for name, figures in workers.items()])
    models = [
        ((*values, name), model)
        for values, device in _list_devices(workers)
        for name, model in device.models.items()
    ]
    yield from _collect(("worker", "device", "model"), models)
    name, labels = "batchery_redis_script_seconds", ["worker", "script"]
    scripts = SummaryMetricFamily(name, "Time of each script.", labels=labels)
    for worker, figures in workers.items():
        for script, took in figures.leases.scripts.items() if figures.leases else ():
            scripts.add_metric([worker, script], took.calls, took.seconds)
    yield scripts


def collect_devices(workers: Workers) -> Iterator[Metric]:
    """What is of each device."""
    yield from _collect(("worker", "device"), _list_devices(workers))


def _list_devices(workers: Workers) -> Iterator[tuple[Sequence[str], DeviceSnapshot]]:
    for worker, figures in workers.items():
        for name, device in figures.devices.items():
            yield (worker, name), device


def collect_failures(workers: Workers) -> Iterator[Metric]:
    """The failures of each worker by class of the error, as the gateway has them."""
    rows = [(name, *each) for name, own in workers.items() for each in own.batches.failures.items()]
    name, text = "batchery_worker_failures_total", "Failed jobs and items."
    yield _family(name, text, ("worker", "error"), rows)


# Of the cluster


def collect_cluster(survey: Survey | None) -> Iterator[Metric]:
    """The metrics of queues.

    Args:
        survey: None if Redis did not answer. Then there is nothing but that: an autoscaler must
            not take a lost Redis for empty queues.
    """
    is_up = survey is not None
    yield _family("batchery_broker_up", "Whether the broker answered.", (), [(is_up,)])
    if survey is None:
        return
    yield from _collect((), [((), survey)])
    ages = [(name, survey.find_oldest_s(name)) for name in survey.queues]
    for name, text, rows in (
        ("waiting_jobs", "Messages that no live worker holds.", survey.queues.items()),
        ("leased_jobs", "That live workers hold.", survey.leased.items()),
        ("oldest_job_seconds", "Age of the oldest not begun.", ages),
    ):
        yield _family(f"batchery_queue_{name}", text, ("queue",), rows)
