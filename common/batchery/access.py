"""Who may do what in Redis: a user of its access lists (ACL) for each role of a deployment. Pure.

A role is a list of grants: commands, and the keys and channels on which they may be run. Redis 7
and Valkey have selectors: there each grant stands for itself. Redis 6.2 knows one set of commands
and one of keys for each user, so there a role may run each of its commands on each of its keys.

Redis checks what a script does like any other command. So EVALSHA allows nothing by itself; it only
must be allowed for the keys that a script names.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchery.errors import SettingsError
from batchery.transport.redis_schema import Keys

#: What all roles need on any connection; none of it reads or writes a key. Redis 6.2 knows CLIENT
#: only as a whole, so that there its harmless parts are named.
CONNECT = "+@connection -@dangerous +@transaction +script|load +script|exists +time +unsubscribe"
CONNECT_6 = f"{CONNECT} +client|id +client|setname +client|tracking +client|caching"

#: Commands on keys of any type, besides those of a type, which a category has as a whole. SORT is
#: in several of them, and reads keys that it does not name, but is called dangerous, too.
ANY_TYPE = "+del +unlink +exists +type +ttl +pttl +expire +pexpire"
ALL_TYPES = (
    f"+@string +@hash +@list +@set +@sortedset +@stream {ANY_TYPE} +evalsha +watch -@dangerous"
)


class Grant(NamedTuple):
    """What a role may do.

    Attributes:
        commands: As access lists have them, such as `+lpush +@hash -@dangerous`.
        keys: Patterns of the keys on which it may run them.
        channels: The same of channels.
    """

    commands: str
    keys: Sequence[str] = ()
    channels: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class KeySpace:
    """Where an app's data are in Redis, and what of it its settings need.

    Attributes:
        queues: Names of all queues that any of its workers consumes.
        prefix: Of the broker's keys: kombu's `global_keyprefix`.
        result_prefix: The same of the result backend.
        separator: Between a queue and a priority in the key of a list.
        fanout: Prefix of the channels to which kombu publishes, without `prefix`.
        control: Exchange of Celery's remote control.
        events: Exchange of Celery's events.
        reads_ages: Whether producers ask for how long jobs have waited, as queues have limits.
        sends_events: Whether producers send an event for each job.
        has_own_worker: Whether `batchery serve` runs a worker beside itself.
    """

    queues: Sequence[str]
    prefix: str = ""
    result_prefix: str = ""
    separator: str = "\x06\x16"
    fanout: str = "/0."
    control: str = "celery.pidbox"
    events: str = "celeryev"
    reads_ages: bool = False
    sends_events: bool = False
    has_own_worker: bool = True

    @property
    def lists(self) -> list[str]:
        """Patterns of the lists of all queues: one for each priority."""
        # Printed, a control character would look like nothing: so any that cannot be printed.
        between = "".join(
            _escape(each) if each.isprintable() else "[^!-~]" for each in self.separator
        )
        return [
            f"{_escape(self.prefix + name)}{step}"
            for name in self.queues
            for step in ("", f"{between}[0-9]")
        ]

    def own(self, *names: str) -> list[str]:
        """Patterns of keys in the broker's database; the names are patterns already."""
        return [_escape(self.prefix) + name for name in names]

    def results(self, *names: str) -> list[str]:
        """Patterns of keys in the database of results."""
        return [_escape(self.result_prefix) + name for name in names]

    def fans(self, name: str) -> str:
        """Pattern of a channel to which kombu publishes."""
        return f"{_escape(self.prefix + self.fanout)}{name}"

    @property
    def lease_keys(self) -> list[str]:
        """What workers know of each other, and hold."""
        keys = Keys(_escape(self.prefix))
        return [
            *(keys.workers, keys.worker_info, keys.schema, keys.token, keys.suspects, keys.waiting),
            *(keys.lease("*"), keys.running("*"), keys.dedupe_keys("*"), f"{keys.tenants}*"),
        ]

    @property
    def job_results(self) -> list[str]:
        """Stored results, which are channels as well."""
        return self.results("celery-task-meta-*")

    @property
    def group_results(self) -> list[str]:
        """What Celery keeps of groups and chords."""
        return self.results("celery-taskset-meta-*", "chord-unlock-*")

    @property
    def streams(self) -> list[str]:
        """By which producers hear of results, and of pieces of them."""
        return self.results(
            *("batchery:reply:*", "batchery-pieces:*", "batchery-reader:*", "batchery-wake:*")
        )


# Roles


def declare(space: KeySpace) -> list[Grant]:
    """Kombu's tables of which queue is bound to which exchange."""
    tables = space.own("_kombu.binding*")
    return [Grant(f"+@set +@sortedset {ANY_TYPE} +evalsha -@dangerous", tables)]


def ask_workers(space: KeySpace) -> list[Grant]:
    """Celery's remote control: to revoke a job, to inspect, and so also to shut down."""
    replies = space.own(f"*.reply.{_escape(space.control)}*")
    unacked = space.own("unacked_index", "unacked_mutex")
    return [
        Grant("+publish", channels=[space.fans(_escape(space.control))]),
        Grant(f"+brpop +rpop +llen {ANY_TYPE}", replies),
        # A client of kombu that awaits answers also looks for messages that were given up.
        Grant("+set +del +watch +get +zrevrangebyscore", unacked),
    ]


def listen(space: KeySpace) -> list[Grant]:
    """To events of workers."""
    return [
        # A pattern that is subscribed to must stand in the list letter by letter.
        Grant("+psubscribe +punsubscribe", channels=[space.fans(f"{space.events}/*")]),
        Grant(f"+llen {ANY_TYPE}", space.own(f"{_escape(space.events)}*")),
    ]


def look(space: KeySpace) -> list[Grant]:
    """To see who is there, and how much waits; the text of jobs only by scripts that count."""
    keys = Keys(_escape(space.prefix))
    tenants = f"{keys.tenants}*"
    return [
        Grant("+llen +lindex", [*space.lists, tenants]),
        Grant("+zrange", [tenants]),
        Grant("+evalsha", [*space.lists, tenants]),
        Grant("+zrange +zcard +hgetall +hmget +hget", [keys.workers, keys.worker_info]),
        Grant("+get", [keys.schema]),
        Grant("+hlen", [keys.lease("*"), keys.dead, keys.suspects]),
        Grant("+zcard", space.own("unacked_index")),
    ]


def produce(space: KeySpace) -> list[Grant]:
    """To send jobs, and to await and forget their results."""
    markers, tenants = space.own("batchery:publisher:*"), space.own("batchery:tenants*")
    results, groups = space.job_results, space.group_results
    grants = [
        Grant("+lpush +llen +pexpire" + " +lindex" * space.reads_ages, space.lists),
        Grant("+evalsha", [*space.lists, *markers, *tenants]),
        Grant("+get +set +del +unlink", markers),
        Grant("+get +mget +exists +del +unlink", results),
        Grant(f"+@string {ANY_TYPE} -@dangerous", groups),
        Grant("+subscribe", channels=[*results, *groups]),
        Grant("+publish", channels=groups),
        Grant(f"+xadd +xread +xtrim +set {ANY_TYPE}", space.streams),
        *declare(space),
        *ask_workers(space),
    ]
    if space.reads_ages:
        grants.append(Grant("+zrange +lindex", tenants))
    if space.sends_events:
        grants.append(Grant("+publish", channels=[space.fans(f"{space.events}/*")]))
    return grants


def work(space: KeySpace) -> list[Grant]:
    """To take jobs, to store their results, and to give back what dead workers held."""
    dead = space.own("batchery:dead", "batchery:dead-messages")
    events = space.fans(f"{space.events}/*")
    unacked = space.own("unacked", "unacked_index", "unacked_mutex")
    kept = space.results("batchery:cache*") + space.own("batchery:rate:*")
    stored = [*space.job_results, *space.group_results, *space.streams]
    broker = [*space.lists, *space.lease_keys]
    return [
        # The first ones are those of every job.
        Grant(ALL_TYPES, [*broker, *stored]),
        Grant("+publish", channels=[*space.job_results, *space.group_results, events]),
        Grant(ALL_TYPES, kept),
        # It keeps dead letters, and reads none.
        Grant("+evalsha", [*broker, *dead]),
        Grant("+hset", dead),
        Grant(ALL_TYPES, unacked),
        # One command may subscribe to both.
        Grant(
            "+psubscribe +punsubscribe",
            channels=[space.fans(_escape(space.control)), space.fans(f"{space.events}/worker.*")],
        ),
        Grant("+subscribe", channels=[*space.job_results, *space.group_results]),
        Grant("+lpush", space.own(f"*.reply.{_escape(space.control)}*")),
        Grant(f"+llen {ANY_TYPE}", space.own(f"*{_escape(space.control)}*")),
        Grant(f"+llen {ANY_TYPE}", space.own(f"{_escape(space.events)}*")),
        *declare(space),
        *ask_workers(space),
        Grant("+info +command"),
    ]


def serve(space: KeySpace) -> list[Grant]:
    """What a producer may, and the gateway's own records; and a worker's rights if it runs one."""
    kept = space.results("batchery:http*")
    return [
        *(work(space) if space.has_own_worker else []),
        *produce(space),
        *look(space),
        Grant(ALL_TYPES, kept),
        # Whether workers of plain Celery wait for jobs.
        Grant("+client|list"),
    ]


def monitor(space: KeySpace) -> list[Grant]:
    """What `batchery stats`, `explain`, `models` and an exporter of metrics need."""
    dead = space.own("batchery:dead")
    return [
        *look(space),
        *declare(space),
        *ask_workers(space),
        *listen(space),
        # `explain` finds the dead letter of a job, without its message.
        Grant("+hscan +hget", dead),
        Grant("+get +exists", space.job_results),
        Grant("+info"),
    ]


def watch_events(space: KeySpace) -> list[Grant]:
    """To watch and to control workers; it can send no job, and read no result."""
    return [
        *listen(space),
        *declare(space),
        *ask_workers(space),
        Grant("+llen", space.lists),
        Grant("+info"),
    ]


def operate(space: KeySpace) -> list[Grant]:
    """What an administrator of the jobs may: dead letters, queues, `batchery submit` anew."""
    dead = space.own("batchery:dead", "batchery:dead-messages")
    held = space.own("batchery:lease:*", "unacked")
    return [
        *monitor(space),
        *produce(space),
        Grant("+@hash +evalsha -@dangerous", dead),
        Grant("+lrange +lindex +rpush +del", [*space.lists, *space.own("batchery:tenants*")]),
        Grant("+hdel +evalsha", [*space.own("batchery:tenants*"), *space.lists]),
        Grant("+hscan", held),
        Grant("+config|get +client|list +slowlog|get +latency|latest +memory|usage"),
    ]


#: Role -> what it may do.
ROLES: Mapping[str, Callable[[KeySpace], list[Grant]]] = {
    "producer": produce,
    "worker": work,
    "gateway": serve,
    "monitor": monitor,
    "flower": watch_events,
    "operator": operate,
}


# Lines


def write_user(
    name: str, grants: Sequence[Grant], password: str | None, *, has_selectors: bool
) -> str:
    """A user as a line of Redis's `aclfile`.

    Args:
        name: Of the user.
        grants: What the user may do.
        password: None for a placeholder, which Redis refuses.
        has_selectors: False for Redis 6.2.

    Raises:
        SettingsError: A key has a character that access lists cannot have.
    """
    hashed = hashlib.sha256(password.encode()).hexdigest() if password else f"SHA256-OF-{name}"
    words = ["user", name, "on", f"#{hashed}", "resetchannels"]
    bare = [each.commands for each in grants if not (each.keys or each.channels)]
    if has_selectors:
        words += [CONNECT, *bare]
        words += [f"({_join(each)})" for each in grants if each.keys or each.channels]
        return " ".join(words)
    keys = [f"~{key}" for each in grants for key in each.keys]
    channels = [f"&{channel}" for each in grants for channel in each.channels]
    commands = " ".join([CONNECT_6, *(each.commands for each in grants)]).split()
    # What is taken away would be given again by a category that comes later.
    commands.sort(key=lambda word: ("+@", "-@", "").index(word[:2] if "@" in word else ""))
    return " ".join(map(_check, dict.fromkeys([*words, *keys, *channels, *commands])))


def _join(grant: Grant) -> str:
    keys = [f"~{_check(key)}" for key in grant.keys]
    channels = [f"&{_check(channel)}" for channel in grant.channels]
    return " ".join([*keys, *channels, grant.commands])


def _check(word: str) -> str:
    if any(each.isspace() or each == "\0" for each in word):
        raise SettingsError(
            f"{word!r} has white space, which no pattern of Redis's access lists can have;"
            " rename the queue, or the prefix"
        )
    return word


def _escape(name: str) -> str:
    """A name as a pattern that only fits this name."""
    return "".join(f"\\{each}" if each in "*?[\\" else each for each in name)
