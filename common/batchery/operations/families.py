"""Figures as families of metrics for Prometheus: of one worker, and of a whole cluster.

docs/metrics.md lists them all. This is the only module of the package that imports
prometheus_client, which the extra `metrics` brings. A name that ends in `_total` is a counter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from batchery.cli.survey import Survey
from batchery.protocol.figures import (
    TOKEN_BOUNDS_S,
    WAIT_BOUNDS_S,
    BatchFigures,
    WorkerFigures,
)

#: Figures of workers, by name.
Workers = Mapping[str, WorkerFigures]

#: Name, what it is, and its value; None where there is none.
Table = Sequence[tuple[str, str, Callable[[Any], float | None]]]

#: Upper bounds of the batch sizes that are counted apart.
SIZE_BOUNDS = (*(float(1 << power) for power in range(11)), float("inf"))

#: Maximum number of workers of which `RunningTotals` knows what it has counted.
MAX_WORKERS = 1000

#: Metrics of the first token and of the pauses, and their label: ours, then OpenTelemetry's.
TEXT_NAMES = (
    ("batchery_first_token_seconds", "batchery_token_seconds", "task"),
    (
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_request_model",
    ),
)

OF_TASK: Table = (
    ("batches_total", "Batches that ran.", lambda task: task.batches),
    ("items_total", "Items that ran.", lambda task: task.items),
    ("tokens_total", "Tokens of these items.", lambda task: task.tokens),
    ("computed_tokens_total", "Tokens with padding.", lambda task: task.computed_tokens),
    ("forward_seconds_total", "Time in forward passes.", lambda task: task.forward_ms / 1e3),
)

OF_WORKER: Table = (
    ("worker_live", "Whether /livez says so.", lambda worker: _get(worker.health, "live")),
    ("worker_ready", "Whether /readyz says so.", lambda worker: _get(worker.health, "ready")),
    (
        *("worker_start_time_seconds", "When it was started, in Unix seconds."),
        lambda worker: _get(worker.health, "started_at_s"),
    ),
    ("worker_waiting_jobs", "Jobs that wait for a device.", lambda worker: worker.waiting),
    ("leases_held", "Messages that it holds.", lambda worker: _get(worker.leases, "held")),
    (
        *("leases_recovered_total", "Messages of dead workers that it put back."),
        lambda worker: _get(worker.leases, "recovered"),
    ),
    (
        *("redis_round_trips_total", "Fetches and scripts of its main process."),
        lambda worker: _get(worker.leases, "round_trips"),
    ),
    ("event_loop_lag_seconds", "How late its event loop was.", lambda worker: worker.loop_lag_s),
    (
        *("device_restarts_total", "Device processes that died."),
        lambda worker: worker.batches.device_restarts,
    ),
)

OF_DEVICE: Table = (
    ("batches_total", "Batches that ran.", lambda device: device.done.batches),
    ("items_total", "Items that ran.", lambda device: device.done.items),
    ("tokens_total", "Tokens of these items.", lambda device: device.done.tokens),
    ("computed_tokens_total", "Tokens with padding.", lambda device: device.done.computed_tokens),
    ("forward_seconds_total", "Time in passes.", lambda device: device.done.forward_ms / 1e3),
    ("ready", "Whether it takes batches.", lambda device: device.state == "ready"),
    ("batches_in_flight", "Batches that it holds.", lambda device: device.batches_in_flight),
    (
        "oldest_batch_seconds",
        "How long its oldest batch runs.",
        lambda device: device.oldest_batch_s,
    ),
    (
        *("resident_memory_bytes", "Main memory of its process."),
        lambda device: device.resident_kib and device.resident_kib * 1024,
    ),
    ("memory_bytes", "Memory that torch holds.", lambda device: device.memory.reserved_bytes),
    ("memory_size_bytes", "All memory of the GPU.", lambda device: device.memory.total_bytes),
    ("peak_flops", "FLOPs per second that it could do.", lambda device: device.memory.peak_flops),
)

OF_MODEL: Table = (
    ("batch_tokens", "Token budget of a pass.", lambda model: model.max_batch_tokens or None),
    ("flops_total", "FLOPs without padding.", lambda model: model.flops or None),
    ("out_of_memory_total", "Passes without memory.", lambda model: model.out_of_memory),
    ("loaded", "Whether its device has it loaded.", lambda model: model.state == "loaded"),
    ("loads_total", "Loads, also from main memory.", lambda model: model.loads or None),
    ("load_seconds", "How long the last load took.", lambda model: model.load_s),
    ("memory_bytes", "Memory that it takes there.", lambda model: model.held_bytes),
    ("slots", "Items that may run at once.", lambda model: model.slots or None),
    ("slots_taken", "Items that run.", lambda model: model.slots_taken if model.slots else None),
    ("steps_total", "Steps of the model.", lambda model: model.steps if model.slots else None),
)


def _get(part: Any, name: str) -> float | None:
    """A figure of a part that is not always there, as older workers do not report all."""
    value: float | None = getattr(part, name, None)
    return value


def _family(name: str, text: str, labels: Sequence[str], rows: Iterable[Sequence[Any]]) -> Metric:
    """A counter or gauge with rows of values: of its labels, then its own."""
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family: Any = kind(name, text, labels=labels)
    for *values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    made: Metric = family
    return made


def _families(
    prefix: str, table: Table, labels: Sequence[str], things: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """All families of a table, with each thing behind the values of its labels."""
    for name, text, read in table:
        rows = [(*values, read(thing)) for values, thing in things]
        yield _family(f"batchery_{prefix}{name}", text, labels, rows)


# Of workers


def collect_sums(batches: BatchFigures) -> Iterator[Metric]:
    """What one worker has counted, without its name: workers can be added up."""
    yield _family(
        *("batchery_jobs_total", "Jobs that ended.", ("task", "outcome")),
        [(name, *each) for name, task in batches.tasks.items() for each in task.outcomes.items()],
    )
    tasks = [((name,), task) for name, task in batches.tasks.items()]
    yield from _families("", OF_TASK, ("task",), tasks)
    yield from _collect_distributions(batches)
    yield from _collect_texts(batches)
    yield _family(
        *("batchery_stage_seconds_total", "Time of batches.", ("stage",)),
        [
            (stage, getattr(batches, f"{stage}_ms") / 1e3)
            for stage in ("prepare", "queued", "forward", "commit")
        ],
    )
    text = "Jobs that Celery's tracer ended."
    yield _family("batchery_tracer_jobs_total", text, ("reason",), batches.tracer_jobs.items())
    text = "Failed jobs and items."
    yield _family("batchery_failures_total", text, ("error",), batches.failures.items())
    yield _family(
        *("batchery_cache_items_total", "Items of cached tasks.", ("task", "result")),
        [
            (task, result, getattr(cache, name))
            for task, cache in batches.caches.items()
            for result, name in (
                *(("hit", "hits"), ("deduplicated", "deduplicated"), ("computed", "computed")),
            )
        ],
    )


def _collect_distributions(batches: BatchFigures) -> Iterator[Metric]:
    sizes = HistogramMetricFamily("batchery_batch_size", "Items of a batch.", labels=["task"])
    text = "From sending a job until its batch left."
    waits = HistogramMetricFamily("batchery_queue_wait_seconds", text, labels=["task"])
    for name, task in batches.tasks.items():
        counts = {float(size.removeprefix("<=")): n for size, n in task.batch_sizes.items()}
        sizes.add_metric([name], _cumulate(SIZE_BOUNDS, counts), task.items)
        waits.add_metric([name], _cumulate(WAIT_BOUNDS_S, task.waits), task.waited_s)
    yield from (sizes, waits)


def _collect_texts(batches: BatchFigures) -> Iterator[Metric]:
    yield _family(
        *("batchery_text_tokens_total", "Tokens of prompts and texts.", ("task", "type")),
        [
            (task, kind, count)
            for task, text in batches.texts.items()
            for kind, count in (("input", text.tokens_in), ("output", text.tokens_out))
        ],
    )
    for first_name, pause_name, label in TEXT_NAMES:
        text = "From sending a job to the first token of its text."
        first = HistogramMetricFamily(first_name, text, labels=[label])
        pauses = HistogramMetricFamily(pause_name, "Between two tokens.", labels=[label])
        for task, found in batches.texts.items():
            counts = _cumulate(WAIT_BOUNDS_S, found.first_tokens)
            first.add_metric([task], counts, found.first_tokens_s)
            pauses.add_metric([task], _cumulate(TOKEN_BOUNDS_S, found.pauses), found.pauses_s)
        yield from (first, pauses)


def _cumulate(bounds: Iterable[float], counts: Mapping[float, int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each counts all that is not above its bound."""
    write: Any = floatToGoString
    return [
        (write(bound), sum(n for each, n in counts.items() if each <= bound)) for bound in bounds
    ]


def collect_workers(workers: Workers) -> Iterator[Metric]:
    """What is of each worker alone, of its models and its scripts."""
    each = [((name,), figures) for name, figures in workers.items()]
    yield from _families("", OF_WORKER, ("worker",), each)
    models = [
        ((worker, device, name), model)
        for worker, figures in workers.items()
        for device, snapshot in figures.devices.items()
        for name, model in snapshot.models.items()
    ]
    yield from _families("model_", OF_MODEL, ("worker", "device", "model"), models)
    name, labels = "batchery_redis_script_seconds", ["worker", "script"]
    scripts = SummaryMetricFamily(name, "Time of each script.", labels=labels)
    for worker, figures in workers.items():
        for script, took in figures.leases.scripts.items() if figures.leases else ():
            scripts.add_metric([worker, script], took.calls, took.seconds)
    yield scripts


def collect_devices(workers: Workers) -> Iterator[Metric]:
    """What is of each device."""
    devices = [
        ((worker, name), device)
        for worker, figures in workers.items()
        for name, device in figures.devices.items()
    ]
    yield from _families("device_", OF_DEVICE, ("worker", "device"), devices)


def collect_failures(workers: Workers) -> Iterator[Metric]:
    """The failures of each worker by class of the error, as the gateway has them."""
    yield _family(
        *("batchery_worker_failures_total", "Failed jobs and items.", ("worker", "error")),
        [
            (worker, *each)
            for worker, figures in workers.items()
            for each in figures.batches.failures.items()
        ],
    )


class RunningTotals:
    """Adds up what workers have counted, and keeps it when one of them goes.

    A plain sum would fall then, and Prometheus would take that for a restart.
    """

    def __init__(self) -> None:
        #: What each worker said last, the one that was seen longest ago first.
        self._last: dict[str, Mapping[tuple[str, ...], float]] = {}
        self._families: dict[str, Metric] = {}
        #: By family, then by the name and the labels of a sample.
        self._totals: defaultdict[str, defaultdict[tuple[str, ...], float]] = defaultdict(
            lambda: defaultdict(float)
        )

    def add(self, workers: Workers) -> Iterator[Metric]:
        """Adds what workers have counted since the last call.

        Returns:
            All totals.
        """
        for name, figures in workers.items():
            self._add(name, figures.batches)
        while len(self._last) > MAX_WORKERS:
            del self._last[next(iter(self._last))]
        for name, known in self._families.items():
            family = Metric(known.name, known.documentation, known.type)
            family.samples = [
                Sample(sample, dict(zip(labels[::2], labels[1::2], strict=True)), value)
                for (sample, *labels), value in self._totals[name].items()
            ]
            yield family

    def _add(self, worker: str, batches: BatchFigures) -> None:
        before = self._last.pop(worker, {})
        now: dict[tuple[str, ...], float] = {}
        gained: list[tuple[str, tuple[str, ...], float]] = []
        for family in collect_sums(batches):
            self._families.setdefault(family.name, family)
            for sample in family.samples:
                key = (sample.name, *(part for label in sample.labels.items() for part in label))
                now[key] = sample.value
                gained.append((family.name, key, sample.value - before.get(key, 0.0)))
        # A worker that was restarted has counted all of it anew.
        is_new = any(value < 0 for _, _, value in gained)
        for name, key, value in gained:
            self._totals[name][key] += now[key] if is_new else value
        self._last[worker] = now


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
    queue, memory = ("queue",), survey.memory
    workers = len(survey.figures) if survey.is_asked else None
    ages = [(name, _find_oldest_s(survey, name)) for name in survey.queues]
    for name, text, labels, rows in (
        ("workers", "Workers with devices that answered.", (), [(workers,)]),
        ("queue_waiting_jobs", "Messages that no live worker holds.", queue, survey.queues.items()),
        ("queue_leased_jobs", "Messages that live workers hold.", queue, survey.leased.items()),
        ("queue_stray_jobs", "Messages in unknown queues.", queue, survey.strays.items()),
        ("queue_oldest_job_seconds", "Age of the oldest job not begun.", queue, ages),
        ("scheduled_jobs", "Held until their time.", (), [(survey.scheduled,)]),
        ("dead_letters", "Dead letters.", (), [(survey.dead_letters,)]),
        ("redis_memory_used_bytes", "What its data take.", (), [(_get(memory, "used_bytes"),)]),
        ("redis_memory_max_bytes", "Its maxmemory; 0: none.", (), [(_get(memory, "max_bytes"),)]),
        (
            *("redis_evicted_keys_total", "Keys thrown away to make room.", ()),
            [(_get(memory, "evicted_keys"),)],
        ),
    ):
        yield _family(f"batchery_{name}", text, labels, rows)


def _find_oldest_s(survey: Survey, queue: str) -> float | None:
    """Age of the oldest job of a queue, in Redis or in a worker; None if it is unknown."""
    held = [worker.waiting_by_queue.get(queue) for worker in survey.figures.values()]
    ages_s = [each.oldest_s for each in held if each is not None]
    if (waited_s := survey.oldest_s.get(queue)) is not None:
        ages_s.append(waited_s)
    return max(ages_s) if ages_s else None if survey.queues[queue] else 0.0


def collect_aliases(survey: Survey | None) -> Iterator[Metric]:
    """What Celery's other exporters call the same."""
    if survey is not None:
        text, rows = "As batchery_queue_waiting_jobs.", survey.queues.items()
        yield _family("celery_queue_length", text, ("queue_name",), rows)


# As text


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def encode(families: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """Writes families in the format that a caller reads, by its header `Accept`.

    Returns:
        The text, and its media type.
    """
    write, media_type = choose_encoder(accept)
    return write(_Families(families)), media_type


def write_textfile(path: str, families: Iterable[Metric]) -> None:
    """Writes families into a file for node_exporter, which sees the old one or the new one whole.

    Raises:
        OSError: It cannot be written.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    write_to_textfile(path, registry)
