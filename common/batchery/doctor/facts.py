"""What the checks go by: facts of Redis, workers, the app and this machine, at one moment. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from kombu.exceptions import OperationalError

from batchery.cli.survey import Survey
from batchery.errors import RedisUnavailable
from batchery.settings import Settings
from batchery.transport.live_workers import RegisteredWorker

#: What a Redis that is away, or hangs, raises.
NO_ANSWER = (RedisUnavailable, OperationalError, redis.ConnectionError, redis.TimeoutError)


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
class BatchTaskFacts:
    """What a batch task of the app is like."""

    name: str
    queue: str
    serializer: str
    acks_late: bool = True
    ignore_result: bool = False
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The local folder of a model, and the suffixes of its files, such as `.safetensors`."""

    exists: bool
    suffixes: Collection[str]


#: Of a fact that was not gathered at all.
_UNKNOWN: Any = FactUnknown("it needs settings that can be read, and a Redis that answers")


@dataclass(frozen=True, eq=False, repr=False)
class Facts:
    """All facts. Reading one that is unknown raises `FactUnknown`."""

    #: As for `celery -A`.
    app: str = "batchery.app"

    # Redis. Its problem is empty if it answers.
    redis_problem: str = _UNKNOWN
    info: Mapping[str, Any] = _UNKNOWN
    config: Mapping[str, str] = _UNKNOWN
    slow_commands: Sequence[SlowCommand] = _UNKNOWN
    round_trip_ms: float = _UNKNOWN
    #: By how much its clock is ahead of this machine's.
    redis_ahead_s: float = _UNKNOWN
    #: Memory of a waiting job in the longest queue; 0 where nothing waits.
    job_bytes: float = _UNKNOWN

    # Workers: those with leases and a fresh heartbeat; what those that answer report, by name.
    registered: Collection[RegisteredWorker] = _UNKNOWN
    survey: Survey = _UNKNOWN
    #: Names of queues.
    consumed: Mapping[str, Collection[str]] = _UNKNOWN
    #: Their `broker_transport_options`.
    worker_options: Mapping[str, Mapping[str, Any]] = _UNKNOWN
    #: By how much the clock is certainly ahead of this machine's.
    worker_ahead_s: Mapping[str, float] = _UNKNOWN

    # The app: its Celery settings, and batch tasks.
    conf: Mapping[str, Any] = _UNKNOWN
    tasks: Sequence[BatchTaskFacts] = _UNKNOWN
    is_installed: bool = _UNKNOWN
    #: What keeps results: `redis`, `other`, or `none`.
    backend: str = _UNKNOWN
    #: Host and port of the broker and of the result backend.
    servers: tuple[str, str] = _UNKNOWN
    #: Where Celery's `build_tracer` comes from.
    tracer_module: str = _UNKNOWN
    settings: Settings = _UNKNOWN
    #: Why workers do not start with them; empty if they do.
    settings_problem: str = _UNKNOWN
    #: By name of the model; None for one of the hub.
    folders: Mapping[str, ModelFolder | None] = _UNKNOWN

    # This machine, with its Batchery, driver and torch.
    host: str = _UNKNOWN
    version: str = _UNKNOWN
    cuda_devices: int = _UNKNOWN
    #: The version of CUDA that the driver, and torch, is made for; None for a torch without.
    driver_cuda: float = _UNKNOWN
    torch_cuda: float | None = _UNKNOWN
    #: Share of main memory in use.
    memory_share: float = _UNKNOWN
    #: Maximum of a process.
    open_files: int = _UNKNOWN
    shm_bytes: int = _UNKNOWN
    in_container: bool = _UNKNOWN
    #: URL of a Flower that lets anybody in; empty if there is none.
    open_flower: str = _UNKNOWN

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, FactUnknown):
            raise FactUnknown(*value.args)
        return value


def ask_each(sources: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The facts of some sources, by name; why, where one fails.

    Once Redis does not answer, nothing more is asked.
    """
    found: dict[str, Any] = {}
    for name, ask in sources.items():
        try:
            found[name] = ask()
        except FactUnknown as unknown:
            found[name] = unknown
        except NO_ANSWER as error:
            return {**found, name: FactUnknown(str(error))}
        except redis.ResponseError as error:
            found[name] = FactUnknown(f"Redis refuses it: {error}")
        except Exception as error:  # noqa: BLE001 (an app's code, and a system, may raise anything)
            found[name] = FactUnknown(f"{type(error).__name__}: {error}")
    return found
