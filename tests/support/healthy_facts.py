"""Facts of a deployment in which nothing is wrong, for tests of `batchery doctor`."""

from collections import Counter
from typing import Any

from batchery.cli.survey import Survey
from batchery.doctor.facts import BatchTaskFacts, Facts, KnownFigures, ModelFolder
from batchery.gateway_settings import GatewaySettings
from batchery.protocol.figures import (
    BatchFigures,
    DeviceSnapshot,
    MemorySnapshot,
    ModelSnapshot,
    WorkerFigures,
)
from batchery.settings import ModelSettings, Settings
from batchery.transport.live_workers import RegisteredWorker

WORKER = "w1@here"

INFO = {
    "redis_version": "7.2.4",
    "cluster_enabled": 0,
    "role": "master",
    "connected_slaves": 0,
    "aof_enabled": 1,
    "used_memory": 100 << 20,
    "maxmemory": 1 << 30,
    "maxmemory_policy": "noeviction",
    "total_system_memory": 16 << 30,
    "evicted_keys": 0,
    "connected_clients": 20,
    "maxclients": 10_000,
    "rejected_connections": 0,
}

CONFIG = {"save": "3600 1 300 100", "timeout": "0", "min-replicas-to-write": "0"}

CONF: dict[str, Any] = {
    "accept_content": ["json"],
    "broker_connection_max_retries": None,
    "broker_transport_options": {},
    "result_expires": 86_400,
    "task_always_eager": False,
    "task_reject_on_worker_lost": None,
    "task_serializer": "json",
    "task_time_limit": None,
    "worker_prefetch_multiplier": 4,
}


def make_model(**options: Any) -> ModelSettings:
    """An embedding model of the hub, pinned."""
    return ModelSettings.model_validate(
        {"kind": "embedding", "model": "org/model", "revision": "a1b2c3", **options}
    )


def make_settings(*, gateway: dict[str, Any] | None = None, **settings: Any) -> Settings:
    """Settings with one model, `embed`; nothing is read from a file or the environment."""
    made = {"models": {"embed": make_model()}, "gateway": GatewaySettings(**(gateway or {}))}
    return Settings.model_construct(**{**made, **settings})


def make_figures(
    *, device: str = "cuda:0", model: dict[str, Any] | None = None, **batches: Any
) -> WorkerFigures:
    """Figures of a worker with one device and one model that did its work well."""
    sums: dict[str, Any] = {"batches": 1000, "jobs": 50_000, "items": 50_000, "tokens": 900_000}
    sums |= {"computed_tokens": 1_000_000, "forward_ms": 5000.0, "waited_ms": 250_000.0}
    sizes = Counter({"<=1": 10, "<=64": 990})
    memory = MemorySnapshot(reserved_bytes=10 << 30, total_bytes=80 << 30)
    models = {"embed": ModelSnapshot(**(model or {}))}
    return WorkerFigures(
        {device: DeviceSnapshot("ready", 1, memory=memory, models=models)},
        BatchFigures(**{**sums, "batch_sizes": sizes, **batches}),
        clock_s=100.0,
        queues=["celery", "embed"],
        time_s=1000.0,
    )


def make_survey(figures: WorkerFigures | None = None, **survey: Any) -> Survey:
    """The answers of one worker, and its queues, of which one has a few jobs."""
    made = Survey(survey.pop("workers", {}), survey.pop("queues", {"embed": 5}), **survey)
    # As `Survey.figures` keeps what it has read.
    vars(made)["figures"] = {WORKER: figures or make_figures()}
    return made


def make_registered(**about: Any) -> RegisteredWorker:
    """A worker of this machine."""
    known = {"name": WORKER, "host": "here", "version": "1.0.0"}
    return RegisteredWorker(1, 5.0, {"celery", "embed"}, **{**known, **about})


def make_facts(**changes: Any) -> Facts:
    """Facts of a deployment in which nothing is wrong, but for the changes."""
    facts: dict[str, Any] = {
        "app": "shop",
        "redis_problem": "",
        "info": KnownFigures("INFO", INFO),
        "config": KnownFigures("CONFIG", CONFIG),
        "slow_commands": [],
        "round_trip_ms": 0.2,
        "redis_ahead_s": 0.001,
        "job_bytes": 500.0,
        "registered": [make_registered()],
        "survey": make_survey(),
        "consumed": {WORKER: ["celery", "embed"]},
        "worker_options": {WORKER: {}},
        "worker_ahead_s": {WORKER: 0.0},
        "conf": CONF,
        "tasks": [BatchTaskFacts("embed", "embed", "json")],
        "is_installed": True,
        "backend": "redis",
        "servers": ("127.0.0.1:6379", "127.0.0.1:6379"),
        "tracer_module": "celery.app.trace",
        "settings": make_settings(),
        "settings_problem": "",
        "folders": {"embed": None},
        "host": "here",
        "version": "1.0.0",
        "cuda_devices": 1,
        "driver_cuda": 12.8,
        "torch_cuda": 12.4,
        "memory_share": 0.5,
        "open_files": 65_536,
        "shm_bytes": 8 << 30,
        "in_container": False,
        "open_flower": "",
    }
    return Facts(**{**facts, **changes})


def make_folder(*suffixes: str) -> ModelFolder:
    """A folder of a model with files of these suffixes."""
    return ModelFolder(True, suffixes)
