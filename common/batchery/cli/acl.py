"""`batchery acl`: prints a user of Redis's access lists for each role of a deployment."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import click
from celery import Celery
from celery.backends.redis import RedisBackend
from kombu.transport.redis import Channel

from batchery.broker_url import is_cluster
from batchery.cli.app import app_options, load_app, url_errors
from batchery.cli.survey import app_queues
from batchery.errors import SettingsError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_queue_limits, get_redis_url
from batchery.protocol.headers import backend_prefix
from batchery.transport.redis_schema import escape_pattern

#: The tags of all shards of a cluster, as a pattern.
ANY_TAG = "{b*}"

#: What the connections to a cluster need, too.
TOPOLOGY = " +cluster|slots +cluster|nodes"

#: What any connection needs; none of it reads or writes a key. CLIENT TRACKING tells of changes to
#: all keys, and so the ids of all jobs.
CONNECT = (
    "+@connection -@dangerous -client|tracking +@transaction +script|load +script|exists +time"
    " +info +unsubscribe"
)

#: Commands on keys of any type; each category has all commands of one type. SORT is in some of
#: them, and reads keys that it does not name, but it is called dangerous, too.
ANY_TYPE = "+del +unlink +exists +type +ttl +pttl +expire +pexpire"
ALL = f"+@string +@hash +@list +@set +@sortedset +@stream {ANY_TYPE} +evalsha +watch -@dangerous"

#: Selectors of each role; `name_keys` says what stands for the words in braces. Redis checks what a
#: script does like any other command, so EVALSHA allows nothing by itself: a selector must have it
#: that has all keys which the script names.
PRODUCE = (
    "{waiting} ~{p}batchery:publisher:* +lpush +llen +evalsha{more}",
    "~{p}batchery:publisher:* +get +set +del +unlink",
    # Large items by reference.
    "~{p}batchery:media:* ~{r}batchery:media:* +set +del +unlink",
    "{results} +get +mget +exists +del +unlink +subscribe",
    "{groups} +subscribe +publish +@string -@dangerous " + ANY_TYPE,
    "{streams} +xadd +xread +xtrim +set +sadd " + ANY_TYPE,
    "{bindings} +evalsha +@set +@sortedset -@dangerous " + ANY_TYPE,
    # Remote control: to revoke a job, to inspect, and so also to shut down.
    "{channels} +publish",
    "{replies} +brpop +rpop +llen " + ANY_TYPE,
    # A client of kombu that awaits answers also looks for messages that were given up.
    "~{p}unacked_index ~{p}unacked_mutex +set +get +del +evalsha +zrange",
)
WORK = (
    "{waiting} {own} {bindings} {inboxes} {results} {groups} +publish +subscribe " + ALL,
    "{channels} +publish +psubscribe +punsubscribe",
    # It keeps dead letters, and reads none.
    "{own} {letters} +evalsha",
    "{letters} +hset +hlen",
    "+client|tracking +client|caching +client|list",
)
OPERATE = (
    "{waiting} {own} {bindings} {letters} {inboxes} {groups} " + ALL,
    "{channels} +psubscribe +punsubscribe",
    "+config|get +client|list",
)
ROLES = {"producer": PRODUCE, "worker": WORK, "operator": (*PRODUCE, *OPERATE)}


@click.command()
@click.argument("roles", nargs=-1, metavar="[ROLE]...", type=click.Choice(list(ROLES)))
@app_options
@click.option("-Q", "--queues", metavar="NAMES", help="Queues of all workers; default: the app's.")
def acl(
    *,
    roles: Sequence[str],
    app_path: str,
    redis_url: str | None,
    queues: str | None,
) -> None:
    """Print users for Redis, each with what its role needs of the app's keys.

    The lines are those of the aclfile of Redis 7 or Valkey, once each has the hash of a password.
    Nothing is asked of Redis.

    \b
    producer  sends jobs and reads results: web servers, `batchery submit`
    worker    `celery worker` and `batchery serve`; takes jobs of all queues
    operator  all else: `batchery stats`, `dead`, `doctor`, `reload`, `exporter`, Flower
    """  # noqa: D301 (click looks for this character)
    app = load_app(app_path, redis_url, with_tasks=not queues)
    names = queues.split(",") if queues else app_queues(app)
    kinds, connect = [name_keys(app, names)], CONNECT
    if is_cluster(get_redis_url(app)):
        kinds.append(name_keys(app, names, in_cluster=True))
        connect += TOPOLOGY
        click.echo("batchery acl: load these lines on each node of the cluster", err=True)
    for role in roles or ROLES:
        name = f"batchery-{role}"
        grants = dict.fromkeys(f"({each.format(**keys)})" for keys in kinds for each in ROLES[role])
        click.echo(f"user {name} on #SHA256-OF-{name} resetchannels {connect} {' '.join(grants)}")


def name_keys(app: Celery, queues: Collection[str], *, in_cluster: bool = False) -> dict[str, str]:
    """Patterns of the app's keys and channels by what they are; connects to nothing.

    Args:
        app: By its settings they have their names.
        queues: All that its workers consume.
        in_cluster: Whether the keys are those in the shards of a cluster.

    Raises:
        SettingsError: Its broker is no Redis, and it names no other one.
    """
    with url_errors("broker_url"):
        connection = app.connection_for_write()
    if connection.transport.driver_type != "redis" and get_redis_url(app) is None:
        raise SettingsError(
            f"access lists are Redis's, but the broker is {connection.as_uri()}; name a Redis"
        )
    with url_errors("result_backend"):
        results = backend_prefix(app.backend) if isinstance(app.backend, RedisBackend) else b""
    options: dict[str, Any] = app.conf.broker_transport_options
    p = ANY_TAG if in_cluster else _escape(options.get("global_keyprefix", ""))
    # On a cluster, a prefix has the tag of some shard.
    r = re.sub(r"^{b\d+}", ANY_TAG, _escape(results.decode()))
    fanout = options.get("fanout_prefix", True)
    fanout = fanout if isinstance(fanout, str) else "/{db}." if fanout else ""
    channel = f"&{p}{_escape(fanout.format(db=str(connection.virtual_host).strip('/') or 0))}"
    control = _escape(f"{app.conf.control_exchange}.pidbox")
    events = _escape(app.conf.event_exchange)
    # Between a queue and a priority, or one of its tenants' lists.
    more_lists = f"{_escape(options.get('sep', Channel.sep))}*"
    # And the lists beside a queue. With those that workers have for themselves: `worker_direct`.
    waiting = [*map(_escape, sorted({*queues, JOBS_QUEUE})), "*.dq2"]
    return {
        "p": p,
        "r": r,
        "waiting": " ".join(f"~{p}{each} ~{p}{each}{more_lists} ~{p}{each}~*" for each in waiting),
        # To refuse jobs that would wait for too long, clients look at the oldest one.
        "more": " +lindex" if get_queue_limits(app) else "",
        "results": f"~{r}celery-task-meta-* &{r}celery-task-meta-*",
        "groups": f"~{r}celery-taskset-meta-* &{r}celery-taskset-meta-* ~{r}chord-unlock-*",
        "streams": f"~{r}batchery:reply:* ~{r}batchery-*",
        "bindings": f"~{p}_kombu.binding*",
        # All of Batchery's but dead letters, and what workers hold in kombu's way.
        "own": f"~{p}batchery[-:][^d]* ~{r}batchery[-:][^d]* ~{p}unacked*",
        "letters": f"~{p}batchery:dead*",
        "replies": f"~{p}*.reply.{control}*",
        "inboxes": f"~{p}*{control}* ~{p}{events}*",
        # A pattern to which somebody subscribes must stand here letter by letter.
        "channels": f"{channel}{control} {channel}{events}/* {channel}{events}/worker.*",
    }


def _escape(name: str) -> str:
    """A name as a pattern, in which nothing is white: any such character stands for all."""
    return re.sub(r"[\0-\x20\x7f]", "[^!-~]", escape_pattern(name))
