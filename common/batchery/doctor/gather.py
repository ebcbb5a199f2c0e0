"""Gathers the facts of a deployment, each once. What cannot be had is a fact that is unknown."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import redis
from celery import Celery
from celery.app import trace
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from kombu.transport import redis as kombu_redis

from batchery.cli.app import TIMEOUT_S, check_broker
from batchery.cli.survey import Survey, WorkerDirectory, app_queues, survey
from batchery.doctor.facts import Facts, FactUnknown, KnownFigures, SlowCommand, TaskOptions
from batchery.doctor.machine import gather_machine, gather_models
from batchery.errors import SettingsError, StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.queue_limits import find_destination
from batchery.task import BatchTask
from batchery.transport.live_workers import LiveWorkers
from batchery.valkey import redis_url

#: PINGs of which the median counts.
PINGS = 20

#: Entries of SLOWLOG that are read; Redis keeps 128 by default.
SLOWLOG_ENTRIES = 128

#: The Celery settings that are checked.
CONF = (
    *("accept_content", "broker_connection_max_retries", "broker_transport_options"),
    *("result_compression", "result_expires", "result_serializer", "task_always_eager"),
    *("task_protocol", "task_reject_on_worker_lost", "task_serializer", "task_time_limit"),
    *("worker_disable_prefetch", "worker_prefetch_multiplier"),
)

#: Where facts come from, by their names.
Sources = Mapping[str, Callable[[], Any]]


def gather(app: Celery, path: str, timeout_s: float, flower_url: str | None) -> Facts:
    """Gathers all facts; takes some five times `timeout_s`, and no longer if Redis hangs.

    Args:
        app: The app.
        path: Its path, as for `celery -A`.
        timeout_s: How long workers are awaited after each question, in seconds.
        flower_url: URL of a Flower; None for port 5555 of this machine's own address.
    """
    known = {"app": path, **gather_machine(flower_url), **_gather_settings(app)}
    if isinstance(known["settings"], FactUnknown) and known["settings_problem"]:
        return Facts(**known)
    known |= _ask_each(_list_app_sources(app))
    try:
        check_broker(app)
    except StartError as error:
        return Facts(**known, redis_problem=str(error))
    with ExitStack() as stack:
        known |= _gather_cluster(app, timeout_s, stack)
    return Facts(**known, redis_problem="")


def _ask_each(sources: Sources) -> dict[str, Any]:
    """The facts of some sources; why, where one fails."""
    found: dict[str, Any] = {}
    for name, ask in sources.items():
        try:
            found[name] = ask()
        except redis.ResponseError as error:
            found[name] = FactUnknown(f"Redis refuses it: {error}")
        except Exception as error:  # noqa: BLE001 (an app's code, and a network, may raise anything)
            found[name] = FactUnknown(f"{type(error).__name__}: {error}")
    return found


# The app


def _gather_settings(app: Celery) -> dict[str, Any]:
    try:
        installation = get_installation(app)
    except SettingsError as error:
        return {"settings": FactUnknown(str(error)), "settings_problem": "", "is_installed": False}
    known: dict[str, Any] = {"is_installed": True, "settings_problem": ""}
    try:
        known["settings"] = installation.settings
        # Registers the models of the settings, which may fail.
        app.loader.import_default_modules()
        app.finalize()
        known["settings_problem"] = str(installation.error or "")
    except SettingsError as error:
        known |= {"settings": FactUnknown(str(error)), "settings_problem": str(error)}
    return known | _ask_each({"folders": lambda: gather_models(installation.settings.models)})


def _list_app_sources(app: Celery) -> Sources:
    return {
        "conf": lambda: {name: app.conf[name] for name in CONF},
        "tasks": lambda: [
            _read_task(app, task) for task in app.tasks.values() if isinstance(task, BatchTask)
        ],
        "backend": lambda: _name_backend(app),
        "servers": lambda: (_name_server(_broker_url(app)), _name_server(app.backend.url)),
        "tracer_module": lambda: trace.build_tracer.__module__,
    }


def _read_task(app: Celery, task: Any) -> TaskOptions:
    return TaskOptions(
        task.name,
        find_destination(app, task.name, {}).queue,
        task.serializer,
        acks_late=task.acks_late,
        ignore_result=bool(task.ignore_result),
        time_limit_s=task.time_limit,
    )


def _name_backend(app: Celery) -> str:
    if isinstance(app.backend, DisabledBackend):
        return "none"
    return "redis" if isinstance(app.backend, RedisBackend) else "other"


def _broker_url(app: Celery) -> str:
    with app.connection_for_read() as connection:
        return str(connection.as_uri())


def _name_server(url: str) -> str:
    """Host and port of a Redis; the path of a socket."""
    parts = urlsplit(redis_url(url))
    host = (parts.hostname or parts.path).replace("localhost", "127.0.0.1")
    return f"{host}:{parts.port or 6379}"


# Redis and workers


def _gather_cluster(app: Celery, timeout_s: float, stack: ExitStack) -> dict[str, Any]:
    # Kombu itself would wait for ever for a Redis that begins to hang now.
    options = app.conf.broker_transport_options
    app.conf.broker_transport_options = {"socket_timeout": TIMEOUT_S, **options}
    known = _ask_each({"channel": lambda: stack.enter_context(app.connection_for_read()).channel()})
    channel = known.pop("channel")
    began_s = time.time()
    known |= _ask_each({"survey": lambda: _survey(app, timeout_s)})
    ended_s = time.time()
    inspect = app.control.inspect(timeout=timeout_s)
    known |= _ask_each(
        {
            "worker_ahead_s": lambda: _compare_clocks(known["survey"], began_s, ended_s),
            "consumed": lambda: {
                worker: [queue["name"] for queue in queues]
                for worker, queues in (inspect.active_queues() or {}).items()
            },
            "worker_conf": lambda: inspect.conf() or {},
        }
    )
    if not isinstance(channel, kombu_redis.Channel):
        return known
    return known | _ask_each(_list_redis_sources(channel, known["survey"]))


def _survey(app: Celery, timeout_s: float) -> Survey:
    return survey(WorkerDirectory(app), app, timeout_s, {*app_queues(app), JOBS_QUEUE})


def _compare_clocks(found: Survey, began_s: float, ended_s: float) -> dict[str, float]:
    """By how much each worker answered before it was asked, or after its answer was there."""
    times_s = {name: figures.time_s for name, figures in found.figures.items()}
    return {
        name: time_s - min(max(time_s, began_s), ended_s)
        for name, time_s in times_s.items()
        if time_s is not None
    }


def _list_redis_sources(channel: Any, found: Survey) -> Sources:
    # Not kombu's own client, which adds its key prefix to some arguments.
    client: Any = redis.Redis(connection_pool=channel.pool)
    prefix, unacked = channel.global_keyprefix, channel.unacked_index_key
    return {
        "info": lambda: KnownFigures("INFO", {**client.info(), **client.info("commandstats")}),
        "config": lambda: KnownFigures("CONFIG", client.config_get("*")),
        "slow_commands": lambda: [_read_slow(each) for each in client.slowlog_get(SLOWLOG_ENTRIES)],
        "round_trip_ms": lambda: statistics.median(_time_ping(client) for _ in range(PINGS)),
        "redis_ahead_s": lambda: _read_clock(client),
        "job_bytes": lambda: _weigh_job(client, prefix, found.queues),
        "registered": lambda: LiveWorkers(client, prefix, unacked).registered().values(),
    }


def _read_slow(entry: Mapping[str, Any]) -> SlowCommand:
    name = bytes(entry["command"]).split(b" ")[0].decode(errors="replace")
    return SlowCommand(name, entry["duration"] / 1e3, time.time() - entry["start_time"])


def _time_ping(client: Any) -> float:
    began_s = time.perf_counter()
    client.ping()
    return (time.perf_counter() - began_s) * 1e3


def _read_clock(client: Any) -> float:
    """By how much Redis's clock is ahead, in seconds, to within half a round trip."""
    began_s = time.time()
    seconds, us = client.time()
    return float(seconds + us / 1e6 - (began_s + time.time()) / 2)


def _weigh_job(client: Any, prefix: str, queues: Mapping[str, int]) -> float:
    """Bytes of a job in the longest queue, on average; 0 where nothing waits."""
    longest = max(queues, key=lambda name: queues[name], default="")
    jobs = client.llen(f"{prefix}{longest}")
    return client.memory_usage(f"{prefix}{longest}", samples=20) / jobs if jobs else 0.0
