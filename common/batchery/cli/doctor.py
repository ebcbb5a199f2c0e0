"""`batchery doctor`: what is wrong with a deployment, of what only an outsider can see.

A check is a function from a deployment to what it found, in words. What a worker sees itself, it
says in its own log.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import click
import redis
from celery import Celery
from rich import box
from rich.table import Table

from batchery.broker_url import is_cluster
from batchery.cli.app import (
    TIMEOUT_S,
    app_options,
    check_broker,
    load_app,
    timeout_option,
)
from batchery.cli.console import AWAY, render
from batchery.cli.survey import (
    PATIENCE_S,
    Survey,
    app_queues,
    consumed_queues,
    open_places,
    registered_workers,
    survey,
)
from batchery.errors import SettingsError, StartError, counted
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import Installation, get_installation, get_redis_url
from batchery.queue_limits import find_destination
from batchery.settings import nearest_name
from batchery.task import BatchTask
from batchery.transport.cluster import make_shard_client

#: Share of Redis's memory beyond which a burst of jobs may fill it, so that publishing is refused.
MAX_MEMORY_SHARE = 0.75

#: Width of the table without a terminal, in characters: lines to copy are not broken.
MIN_WIDTH = 140

#: What the nodes of a cluster say of one that does not answer.
AWAY_FLAGS = {"fail", "fail?", "noaddr"}

#: Severities, and the exit code of the worst.
SEVERITIES = {"warning": 1, "error": 2}


T = TypeVar("T")


class Unchecked(Exception):
    """A fact cannot be had; the text says why."""


class Deployment:
    """What there is to look at. Each fact is asked for once, when a check first needs it."""

    def __init__(self, app: Celery, timeout_s: float = PATIENCE_S) -> None:
        """Asks nothing yet.

        Args:
            app: The app; the modules of its tasks are imported.
            timeout_s: How long workers that live are awaited, in seconds.
        """
        self.app = app
        self._timeout_s = timeout_s
        #: Why Redis does not answer, or cannot be found; then nothing more is checked.
        self.redis_problem = ""

    @cached_property
    def infos(self) -> Mapping[str, Mapping[str, Any]]:
        """What `INFO` says, by server."""
        return self._ask_redis(lambda client: client.info())

    def read_config(self, name: str) -> Mapping[str, str]:
        """What `CONFIG GET` says of a setting of Redis, by server."""
        return self._ask_redis(lambda client: str(client.config_get(name)[name]))

    @cached_property
    def nodes(self) -> Mapping[str, Mapping[str, Any]]:
        """What `CLUSTER NODES` says, by address; empty if there is no cluster."""
        url = get_redis_url(self.app)
        if url is None or not is_cluster(url):
            return {}
        with make_shard_client(url, 0, socket_timeout=TIMEOUT_S) as client:
            return dict(client.cluster("nodes"))

    def _ask_redis(self, ask: Callable[[Any], T]) -> Mapping[str, T]:
        """What each server with jobs answers, by how a finding about it begins."""
        answers: dict[str, T] = {}
        with open_places(self.app) as places:
            for _, client, _ in places:
                if client is not None and (name := name_server(client)) not in answers:
                    answers[name] = ask(client)
        if not answers:
            raise Unchecked("the broker is no Redis")
        return answers if len(answers) > 1 else {"": next(iter(answers.values()))}

    def is_away(self, node: str) -> bool:
        """Whether a node of a cluster does not answer the others."""
        return not AWAY_FLAGS.isdisjoint(self.nodes[node]["flags"].split(","))

    @cached_property
    def registered(self) -> list[Any]:
        """The workers with leases that live."""
        return [each for each in registered_workers(self.app).values() if not each.is_dead]

    @cached_property
    def survey(self) -> Survey:
        """What workers say, and what waits."""
        return survey(self.app, self._timeout_s, {*app_queues(self.app), JOBS_QUEUE})

    @cached_property
    def consumed(self) -> Mapping[str, set[str]]:
        """Names of the queues that each worker consumes, by what it answers or has registered."""
        registered = {each.name or "": set(each.queues or ()) for each in self.registered}
        return consumed_queues(self.app) | registered

    @property
    def installation(self) -> Installation | None:
        """What `install` made of the app; None if it was not called."""
        with suppress(SettingsError):
            return get_installation(self.app)
        return None

    @property
    def batch_tasks(self) -> list[Any]:
        """The batch tasks of the app."""
        return [task for task in self.app.tasks.values() if isinstance(task, BatchTask)]


def name_server(client: Any) -> str:
    """How a finding begins that is about one of several servers."""
    given = client.connection_pool.connection_kwargs
    host, port = given.get("host"), given.get("port")
    if "cluster" in given:
        host, port = given["cluster"].find_node(given["slot"])
    return f"{host}:{port}: "


#: Finds what is wrong, in words.
Find = Callable[[Deployment], Iterable[str]]


#: A check: its name, its severity, why it matters, a line to copy, and what finds it. Words in
#: capitals of the line are the user's to fill in.
CHECKS: list[tuple[str, str, str, str, Find]] = []


def check(*words: str) -> Callable[[Find], Find]:
    """Registers a check."""

    def register(find: Find) -> Find:
        name, severity, why, fix = words
        CHECKS.append((name, severity, why, fix, find))
        return find

    return register


# The app


@check(
    *("app-invalid", "error", "workers do not start with it"),
    "celery -A APP worker  # stops with the same line; docs/settings.md has all settings",
)
def find_invalid_app(on: Deployment) -> Iterator[str]:
    """Settings that cannot be read, or tasks that cannot be imported."""
    try:
        on.app.loader.import_default_modules()
        on.app.finalize()
        if on.installation is not None:
            _ = on.installation.settings
            yield from [str(on.installation.error)] if on.installation.error else []
    except Exception as error:  # noqa: BLE001 (a module of the app may raise anything)
        if isinstance(error, SettingsError) and not on.app.conf.broker_read_url:
            # Celery would now ask its own default, a broker that nobody named.
            on.redis_problem = "the settings, which say where Redis is, cannot be read"
        yield str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"


@check("app-not-installed", "error", "its workers run items one by one", "batchery.install(app)")
def find_no_install(on: Deployment) -> Iterator[str]:
    """Batch tasks in an app without `batchery.install`."""
    if on.batch_tasks and on.installation is None:
        yield f"{counted(len(on.batch_tasks), 'batch task')}, and install was not called"


# Redis


@check(
    *("redis-away", "error", "nothing runs without it"),
    "redis-cli -u URL PING  # start one there, or set broker_url to another",
)
def find_no_redis(on: Deployment) -> Iterator[str]:
    """A broker that does not answer."""
    # Kombu itself would wait for ever for a Redis that begins to hang.
    options = on.app.conf.broker_transport_options
    on.app.conf.broker_transport_options = {"socket_timeout": TIMEOUT_S, **options}
    try:
        check_broker(on.app)
    except (*AWAY, StartError) as error:
        on.redis_problem = str(error)
        yield on.redis_problem


@check(
    *("redis-eviction", "error", "Redis throws queues and leases away to make room"),
    "redis-cli CONFIG SET maxmemory-policy noeviction && redis-cli CONFIG REWRITE",
)
def find_eviction(on: Deployment) -> Iterator[str]:
    """A `maxmemory-policy` other than `noeviction`."""
    for server, info in on.infos.items():
        policy, evicted = info["maxmemory_policy"], f"{info['evicted_keys']:,} keys were evicted"
        if policy != "noeviction":
            yield f"{server}maxmemory-policy is {policy}; {evicted} since Redis started"


@check(
    *("redis-no-persistence", "error", "a restart of Redis loses every job and result"),
    "redis-cli CONFIG SET appendonly yes && redis-cli CONFIG REWRITE",
)
def find_lost_on_restart(on: Deployment) -> Iterator[str]:
    """Neither an append-only file nor snapshots."""
    without = [server for server, info in on.infos.items() if not info["aof_enabled"]]
    saves = on.read_config("save") if without else {}
    yield from (f"{each}appendonly is no, and save is empty" for each in without if not saves[each])


@check(
    *("redis-memory", "warning", "a full Redis refuses new jobs"),
    "redis-cli CONFIG SET maxmemory 4gb && redis-cli CONFIG REWRITE",
)
def find_full_memory(on: Deployment) -> Iterator[str]:
    """More than three quarters of Redis's memory in use."""
    for server, info in on.infos.items():
        # Some managed servers do not say what their machine has.
        limit = info["maxmemory"] or info.get("total_system_memory", 0)
        if info["used_memory"] > MAX_MEMORY_SHARE * limit > 0:
            share, size_mib = info["used_memory"] / limit, limit / 2**20
            yield f"{server}Redis uses {share:.0%} of its memory, which is {size_mib:,.0f} MiB"


@check(
    *("cluster-node-away", "warning", "its data have one copy less"),
    "redis-cli -u redis://HOST:PORT CLUSTER NODES  # start it again, or have all forget it",
)
def find_node_away(on: Deployment) -> Iterator[str]:
    """A node of a cluster that the others do not reach."""
    yield from (f"node {each} does not answer" for each in on.nodes if on.is_away(each))


@check(
    *("cluster-no-replica", "warning", "if it dies, its jobs and results wait until it is back"),
    "redis-cli --cluster add-node NEW_HOST:PORT HOST:PORT --cluster-slave",
)
def find_no_replica(on: Deployment) -> Iterator[str]:
    """A node of a cluster without a replica."""
    followed = {node["master_id"] for name, node in on.nodes.items() if not on.is_away(name)}
    for name, node in on.nodes.items():
        if node["slots"] and node["node_id"] not in followed:
            yield f"node {name} has no replica"


# Workers and queues


@check("worker-none", "warning", "jobs wait until there is one", "celery -A APP worker")
def find_no_worker(on: Deployment) -> Iterator[str]:
    """No worker that lives."""
    if not on.consumed:
        yield "no worker answers, and none is registered"


@check(
    *("worker-stock", "warning", "it runs items one by one, and dead it holds jobs for an hour"),
    "batchery.install(app)  # or for plain workers: celery -A APP worker -Q OTHER",
)
def find_stock(on: Deployment) -> Iterator[str]:
    """Workers without leases on queues of batch tasks."""
    names = {each.name for each in on.registered}
    queues = {find_destination(on.app, task.name, {}).queue for task in on.batch_tasks}
    for worker, consumed in on.consumed.items():
        # One whose name is not known yet may be any.
        if worker not in names and None not in names and (shared := sorted(queues & consumed)):
            yield f"{worker} has no leases, and consumes {', '.join(shared)}"


@check(
    *("queue-unserved", "error", "these jobs wait for ever"),
    "celery -A APP worker -Q QUEUE  # or send to the queue that was meant",
)
def find_unserved(on: Deployment) -> Iterator[str]:
    """Queues of the app with jobs that no worker consumes, such as one whose `-Q` is misspelt."""
    consumed = set[str]().union(*on.consumed.values())
    for queue, jobs in on.survey.queues.items():
        if jobs and queue not in consumed:
            text = f"{counted(jobs, 'job')} in queue {queue!r}, and no worker consumes it"
            yield text + nearest_name(queue, sorted(consumed))


# What was found


def diagnose(on: Deployment, path: str) -> dict[str, Any]:
    """Makes all checks.

    Args:
        on: The deployment.
        path: That of its app, as for `celery -A`.

    Returns:
        `findings`, errors first, each with `check`, `severity`, `found`, `why` and `fix`; why
        checks are `unchecked`, by name; the number that `passed`; and the `exit_code`: that of the
        worst finding.
    """
    findings, unchecked, passed = list[dict[str, str]](), dict[str, str](), 0
    for name, severity, why, fix, find in CHECKS:
        if on.redis_problem:
            unchecked[name] = on.redis_problem
            continue
        try:
            found = list(find(on))
        except Exception as error:  # noqa: BLE001 (an app's code, and a system, may raise anything)
            unchecked[name] = _explain(on, error)
            continue
        passed += not found
        known = {"check": name, "severity": severity, "why": why}
        line = fix.replace("APP", shlex.quote(path))
        findings += [{**known, "found": each, "fix": line} for each in found]
    findings.sort(key=lambda each: -SEVERITIES[each["severity"]])
    worst = SEVERITIES[findings[0]["severity"]] if findings else 0
    return {"findings": findings, "unchecked": unchecked, "passed": passed, "exit_code": worst}


def _explain(on: Deployment, error: Exception) -> str:
    """Why a check could not be made; once Redis does not answer, nothing more is asked."""
    if isinstance(error, redis.ResponseError) or isinstance(error.__cause__, redis.ResponseError):
        return f"Redis refuses it: {error}"
    if isinstance(error, (*AWAY, StartError)):
        on.redis_problem = str(error)
    return str(error) if isinstance(error, (Unchecked, *AWAY, StartError)) else repr(error)


@click.command()
@app_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@timeout_option(PATIENCE_S, "How long workers are awaited that live and do not answer.")
@click.pass_context
def doctor(
    context: click.Context,
    *,
    app_path: str,
    redis_url: str | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Check a deployment, running or planned, and say how to mend what is wrong.

    Looks at each Redis with jobs, the app's settings, the workers that live, and this machine; so
    run it where workers run. It changes nothing. A check that could not be made, because Redis
    forbids a command or no worker answers, says why, and does not count. docs/doctor.md lists all
    checks.

    \b
    Exit codes:
      0  nothing is wrong
      1  warnings: it works, but slower, or less safely, than it could
      2  errors: jobs are lost, or wait for ever; or there is no such app
    """  # noqa: D301 (click looks for this character)
    app = load_app(app_path, redis_url)
    report = diagnose(Deployment(app, timeout_s), app_path)
    click.echo(json.dumps(report) if as_json else draw(**report))
    context.exit(report["exit_code"])


def draw(
    findings: Sequence[Mapping[str, str]], unchecked: Mapping[str, str], passed: int, **_: Any
) -> str:
    """A row for each finding, and for each reason why checks could not be made."""
    table = Table(box=box.SIMPLE, show_header=False)
    for each in findings:
        text = "\n".join(each[name] for name in ("found", "why", "fix"))
        table.add_row(each["severity"], each["check"], text)
    for why in dict.fromkeys(unchecked.values()):
        names = [name for name, each in unchecked.items() if each == why]
        table.add_row("unchecked", counted(len(names), "check"), f"{why}\n{', '.join(names)}")
    wrong, unmade = counted(len(findings), "finding"), counted(len(unchecked), "check")
    end = f"{counted(passed, 'check')} found nothing wrong, {wrong}; {unmade} could not be made"
    return f"{render(table, MIN_WIDTH)}\n\n{end}" if table.row_count else end
