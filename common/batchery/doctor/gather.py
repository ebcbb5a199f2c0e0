"""Gathers the facts of a deployment, each once. What cannot be had is a fact that is unknown."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from celery import Celery
from celery.app import trace
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from kombu.transport import redis as kombu_redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchery.cli.app import TIMEOUT_S, check_broker
from batchery.cli.console import AWAY
from batchery.cli.stray_queues import ALL_CALLS, StrayQueues
from batchery.cli.survey import Survey, app_queues, survey
from batchery.doctor.facts import (
    BatchTaskFacts,
    Facts,
    FactUnknown,
    KnownFigures,
    SlowCommand,
    ask_each,
)
from batchery.doctor.machine import gather_machine, gather_models
from batchery.errors import AppNotImportable, SettingsError, StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.queue_limits import find_destination
from batchery.task import BatchTask
from batchery.transport.live_workers import LiveWorkers
from batchery.transport.redis_schema import Keys, find_tenant_lists
from batchery.valkey import redis_url

#: PINGs of which the median counts.
PINGS = 20

#: Entries of SLOWLOG that are read; Redis keeps 128 by default.
SLOWLOG_ENTRIES = 128

#: The Celery settings that are checked.
CONF = (
    *("accept_content", "broker_connection_max_retries", "broker_transport_options"),
    *("result_expires", "task_always_eager", "task_reject_on_worker_lost", "task_serializer"),
    *("task_time_limit", "worker_prefetch_multiplier"),
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
    known = {"app": path, **gather_machine(flower_url), **_gather_settings(app, path)}
    if "settings" not in known:
        return Facts(**known)  # They may say where Redis is.
    known |= ask_each(_list_app_sources(app))
    try:
        check_broker(app)
        known |= _gather_cluster(app, timeout_s)
    except (*AWAY, StartError) as error:
        return Facts(**known, redis_problem=str(error))
    return Facts(**known, redis_problem="")


# The app


def _gather_settings(app: Celery, path: str) -> dict[str, Any]:
    """What `install` made of the app, and the folders of its models.

    Raises:
        AppNotImportable: A module that it includes cannot be imported.
    """
    try:
        app.loader.import_default_modules()
        app.finalize()
    except SettingsError as error:
        return {"settings_problem": str(error)}
    except Exception as error:
        raise AppNotImportable(f"app {path!r}: {type(error).__name__}: {error}") from error
    try:
        installation = get_installation(app)
    except SettingsError as error:
        return {"is_installed": False, "settings_problem": "", "settings": FactUnknown(str(error))}
    try:
        models = installation.settings.models
    except SettingsError as error:
        return {"is_installed": True, "settings_problem": str(error)}
    return {
        "is_installed": True,
        "settings_problem": str(installation.error or ""),
        "settings": installation.settings,
        **ask_each({"folders": lambda: gather_models(models)}),
    }


def _list_app_sources(app: Celery) -> Sources:
    return {
        "conf": lambda: {name: app.conf[name] for name in CONF},
        "tasks": lambda: [
            _read_task(app, task) for task in app.tasks.values() if isinstance(task, BatchTask)
        ],
        "backend": lambda: _name_backend(app),
        "servers": lambda: _name_servers(app),
        "tracer_module": lambda: trace.build_tracer.__module__,
    }


def _read_task(app: Celery, task: Any) -> BatchTaskFacts:
    return BatchTaskFacts(
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


def _name_servers(app: Celery) -> tuple[str, str]:
    """Host and port of broker and result backend, of the first one of several."""
    with app.connection_for_read() as connection:
        urls = (connection.as_uri(), str(getattr(app.backend, "url", None) or ""))
    parts = [urlsplit(redis_url(url).partition(";")[0]) for url in urls]
    # Kombu escapes what stands between the brackets of an IPv6 address.
    names = [
        unquote(each.hostname or each.path).replace("localhost", "127.0.0.1") for each in parts
    ]
    broker, results = (f"{name}:{at.port or 6379}" for name, at in zip(names, parts, strict=True))
    return broker, results


# Redis and workers


def _gather_cluster(app: Celery, timeout_s: float) -> dict[str, Any]:
    # Kombu itself would wait for ever for a Redis that begins to hang now.
    options = app.conf.broker_transport_options
    app.conf.broker_transport_options = {"socket_timeout": TIMEOUT_S, **options}
    known: dict[str, Any] = {}
    more: Sources = {}
    with app.connection_for_read() as connection, connection.channel() as channel:
        if isinstance(channel, kombu_redis.Channel):
            client = _make_client(channel)
            known |= ask_each(_list_redis_sources(client, channel))
            more = {"job_bytes": lambda: _weigh_job(client, channel, found.queues)}
    began_s = time.time()
    known |= ask_each({"survey": lambda: _survey(app, timeout_s)})
    found = known["survey"]
    if isinstance(found, FactUnknown):
        return known
    ended_s = time.time()
    inspect = app.control.inspect(timeout=timeout_s)
    sources = {
        **more,
        "worker_ahead_s": lambda: _compare_clocks(found, began_s, ended_s),
        "consumed": lambda: {
            worker: [queue["name"] for queue in queues]
            for worker, queues in (inspect.active_queues() or {}).items()
        },
        "worker_options": lambda: {
            worker: _read_transport_options(conf) for worker, conf in (inspect.conf() or {}).items()
        },
    }
    return known | ask_each(sources)


def _read_transport_options(conf: Mapping[str, Any]) -> Mapping[str, Any]:
    # Settings of Django projects have a prefix, and what the worker itself has set has none.
    names = [name for name in conf if name.lower().endswith("broker_transport_options")]
    return conf[min(names, key=len)] if names else {}


def _make_client(channel: Any) -> Any:
    """A client with connections of its own, which answers or fails within seconds."""
    pool = channel._get_pool()
    pool.connection_kwargs |= {"socket_timeout": TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis(connection_pool=pool)


def _survey(app: Celery, timeout_s: float) -> Survey:
    known = {*app_queues(app), JOBS_QUEUE}
    strays = StrayQueues(app).look(known, ALL_CALLS)
    return survey(app, timeout_s, {*known, *strays})


def _compare_clocks(found: Survey, began_s: float, ended_s: float) -> dict[str, float]:
    """By how much each worker answered before it was asked, or after its answer was there."""
    times_s = {name: figures.time_s for name, figures in found.figures.items()}
    return {
        name: time_s - min(max(time_s, began_s), ended_s)
        for name, time_s in times_s.items()
        if time_s is not None
    }


def _list_redis_sources(client: Any, channel: Any) -> Sources:
    workers = LiveWorkers(client, channel.global_keyprefix, channel.unacked_index_key)
    return {
        "info": lambda: KnownFigures("INFO", client.info()),
        "config": lambda: KnownFigures("CONFIG", client.config_get("*")),
        "slow_commands": lambda: [_read_slow(each) for each in client.slowlog_get(SLOWLOG_ENTRIES)],
        "round_trip_ms": lambda: statistics.median(_time_ping(client) for _ in range(PINGS)),
        "redis_ahead_s": lambda: _read_clock(client),
        "registered": lambda: [each for each in workers.registered().values() if not each.is_dead],
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


def _weigh_job(client: Any, channel: Any, queues: Mapping[str, int]) -> float:
    """Bytes of a job in the longest queue, on average; 0 where nothing waits."""
    longest = max(queues, key=lambda name: queues[name], default="")
    names = Keys(channel.global_keyprefix)
    own = [names.queue(channel._q_for_pri(longest, step)) for step in channel.priority_steps]
    # Where they are sorted by tenant, the list itself still has an entry for each.
    jobs: int = sum(map(client.llen, own))
    lists = [*own, *(key for each in own for key in find_tenant_lists(client, names, each))]
    sizes_bytes: list[int] = [client.memory_usage(key, samples=20) or 0 for key in lists if jobs]
    return sum(sizes_bytes) / max(jobs, 1)
