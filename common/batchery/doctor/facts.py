"""What the checks go by: facts of Redis, workers, the app and this machine, at one moment. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchery.cli.survey import Survey
from batchery.settings import Settings
from batchery.transport.live_workers import RegisteredWorker


class FactUnknown(Exception):
    """A fact could not be gathered; the text says why."""


class KnownFigures(dict[str, Any]):
    """Figures by name; one that is not there is an unknown fact, as versions of Redis differ."""

    def __init__(self, source: str, figures: Mapping[str, Any]) -> None:
        """Takes the figures; `source` is who reported them, as `INFO`."""
        super().__init__(figures)
        self._source = source

    def __missing__(self, name: str) -> Any:
        raise FactUnknown(f"{self._source} has no {name}")


@dataclass(frozen=True, slots=True)
class SlowCommand:
    """A command that Redis took long for, from its SLOWLOG."""

    name: str
    took_ms: float
    age_s: float


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What a batch task of the app is like."""

    name: str
    queue: str
    serializer: str
    acks_late: bool = True
    ignore_result: bool = False
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What is in the local folder of a model."""

    exists: bool
    #: Suffixes of its files, such as `.safetensors`.
    suffixes: Collection[str]


_UNKNOWN: Any = FactUnknown("nobody gathered it")


@dataclass(frozen=True, eq=False, repr=False)
class Facts:
    """All facts. Reading one that is unknown raises `FactUnknown`.

    Attributes:
        app: The app, as for `celery -A`.
        redis_problem: Why Redis does not answer; empty if it does.
        info: Redis's INFO, with `commandstats`.
        config: Redis's CONFIG.
        slow_commands: What is in Redis's SLOWLOG.
        round_trip_ms: Median of some PINGs.
        redis_ahead_s: By how much Redis's clock is ahead of this machine's, in seconds.
        job_bytes: Memory of a waiting job in the longest queue; 0 where nothing waits.
        registered: Workers with leases, those of them that died lately included.
        survey: The workers' figures, and what waits.
        consumed: Names of the queues of each worker, by its name, for all workers that answer.
        worker_conf: Each worker's Celery settings that are not the defaults.
        worker_ahead_s: By how much each worker's clock is certainly ahead of this machine's.
        conf: The app's Celery settings.
        tasks: The app's batch tasks.
        is_installed: Whether `batchery.install` was called with the app.
        backend: What keeps results: `redis`, `other`, or `none`.
        servers: Host and port of the broker and of the result backend.
        tracer_module: Where Celery's `build_tracer` comes from.
        settings: Batchery's settings.
        settings_problem: Why these cannot be read; empty if they can.
        folders: Local folders of the settings' models, by name of the model; None for a hub's.
        host: Name of this machine.
        version: Version of Batchery here.
        cuda_devices: CUDA devices of this machine.
        driver_cuda: Version of CUDA that the driver here is made for, as 12.4.
        torch_cuda: The same of the torch here; None for a torch without CUDA.
        memory_share: Share of this machine's main memory that is in use.
        open_files: Maximum of files that a process may have open here.
        shm_bytes: Size of /dev/shm.
        open_flower: URL of a Flower that lets anybody in; empty if there is none.
    """

    app: str = "batchery.app"
    redis_problem: str = _UNKNOWN
    info: Mapping[str, Any] = _UNKNOWN
    config: Mapping[str, str] = _UNKNOWN
    slow_commands: Sequence[SlowCommand] = _UNKNOWN
    round_trip_ms: float = _UNKNOWN
    redis_ahead_s: float = _UNKNOWN
    job_bytes: float = _UNKNOWN
    registered: Collection[RegisteredWorker] = _UNKNOWN
    survey: Survey = _UNKNOWN
    consumed: Mapping[str, Collection[str]] = _UNKNOWN
    worker_conf: Mapping[str, Mapping[str, Any]] = _UNKNOWN
    worker_ahead_s: Mapping[str, float] = _UNKNOWN
    conf: Mapping[str, Any] = _UNKNOWN
    tasks: Sequence[TaskOptions] = _UNKNOWN
    is_installed: bool = _UNKNOWN
    backend: str = _UNKNOWN
    servers: tuple[str, str] = _UNKNOWN
    tracer_module: str = _UNKNOWN
    settings: Settings = _UNKNOWN
    settings_problem: str = _UNKNOWN
    folders: Mapping[str, ModelFolder | None] = _UNKNOWN
    host: str = _UNKNOWN
    version: str = _UNKNOWN
    cuda_devices: int = _UNKNOWN
    driver_cuda: float = _UNKNOWN
    torch_cuda: float | None = _UNKNOWN
    memory_share: float = _UNKNOWN
    open_files: int = _UNKNOWN
    shm_bytes: int = _UNKNOWN
    open_flower: str = _UNKNOWN

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, FactUnknown):
            raise FactUnknown(*value.args)
        return value
