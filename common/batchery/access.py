"""Who may do what in Redis: a user of its access lists (ACL) for each role of a deployment. Pure.

A role is a list of grants: commands, and the keys and channels on which they may be run. Redis 7
and Valkey have selectors: there each grant stands for itself. Redis 6.2 knows one set of commands
and one of keys for each user, so there a role may run each of its commands on each of its keys.

Redis checks what a script does like any other command. So EVALSHA allows nothing by itself; it only
must be allowed for all keys that a script names.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchery.errors import SettingsError
from batchery.transport.redis_schema import Keys, escape_pattern

#: What all roles need on any connection; none of it reads or writes a key. Redis 6.2 knows CLIENT
#: only as a whole, so that there its harmless parts are named. CLIENT TRACKING is none of them: it
#: tells of changes to all keys, and so the ids of all jobs.
CONNECT = "+@connection -@dangerous +@transaction +script|load +script|exists +time +unsubscribe"
CONNECT_6 = f"{CONNECT} +client|id +client|setname"
CONNECT_7 = f"{CONNECT} -client|tracking"

#: Commands on keys of any type; each category has all commands of one type. SORT is in some of
#: them, and reads keys that it does not name, but it is called dangerous, too.
ANY_TYPE = "+del +unlink +exists +type +ttl +pttl +expire +pexpire"
ALL = f"+@string +@hash +@list +@set +@sortedset +@stream {ANY_TYPE} +evalsha +watch -@dangerous"


@dataclass(frozen=True, kw_only=True)
class KeySpace:
    """What the names of an app's keys are made of, and what its settings need."""

    #: All that any of its workers consumes.
    queues: Sequence[str]
    #: Those with `x-expires`, whose lists kombu's producers let expire.
    expiring: Sequence[str] = ()
    #: Of the broker's keys, and of the result backend's: `global_keyprefix`.
    prefix: str = ""
    result_prefix: str = ""
    #: Between a queue and a priority.
    separator: str = "\x06\x16"
    #: Of channels, behind `prefix`; and the exchanges of remote control and of events.
    fanout: str = "/0."
    control: str = "celery.pidbox"
    events: str = "celeryev"
    #: Whether each worker has a queue of its own, besides: `worker_direct`.
    has_direct: bool = False
    #: Whether producers ask for how long jobs have waited, and whether they send events.
    reads_ages: bool = False
    sends_events: bool = False
    #: Whether `batchery serve` runs a worker beside itself.
    has_own_worker: bool = True


def list_patterns(space: KeySpace) -> dict[str, list[str]]:
    """The patterns of an app's keys and channels, by the names that grants have for them."""
    keys, results = Keys(escape_pattern(space.prefix)), Keys(escape_pattern(space.result_prefix))
    control, events = escape_pattern(space.control), escape_pattern(space.events)
    fanout = keys.queue(escape_pattern(space.fanout))
    # A control character would look like nothing: so any that cannot be printed.
    step = "".join(
        escape_pattern(char) if char.isprintable() else "[^!-~]" for char in space.separator
    )
    steps = ("", f"{step}[0-9]")
    lists = [keys.queue(escape_pattern(name)) for name in space.queues]
    lists += [keys.queue("*.dq2")] * space.has_direct
    return {
        "queues": [f"{each}{end}" for each in lists for end in steps],
        "expiring": [
            f"{keys.queue(escape_pattern(each))}{end}" for each in space.expiring for end in steps
        ],
        "bindings": [keys.queue("_kombu.binding*")],
        "unacked": [keys.queue("unacked*")],
        "visibility": [keys.queue("unacked_index"), keys.queue("unacked_mutex")],
        "replies": [keys.queue(f"*.reply.{control}*")],
        "inboxes": [keys.queue(f"*{control}*"), keys.queue(f"{events}*")],
        "markers": [keys.queue("batchery:publisher:*")],
        "tenants": [f"{keys.tenants}*"],
        "workers": [keys.workers, keys.worker_info, keys.schema],
        "leases": [
            *(keys.token, keys.suspects, keys.waiting),
            *(keys.lease("*"), keys.running("*"), keys.dedupe_keys("*")),
        ],
        "letters": [keys.dead],
        "messages": [keys.dead_messages],
        "rates": [keys.queue("batchery:rate:*")],
        "cache": [results.queue("batchery:cache*")],
        "http": [results.queue("batchery:http*")],
        # The next two are channels as well.
        "results": [results.queue("celery-task-meta-*")],
        "groups": [results.queue("celery-taskset-meta-*"), results.queue("chord-unlock-*")],
        "streams": [
            *(results.queue("batchery:reply:*"), results.queue("batchery-pieces:*")),
            *(results.queue("batchery-reader:*"), results.queue("batchery-wake:*")),
            results.queue("batchery-woken:*"),
        ],
        # Channels. A pattern to which somebody subscribes must stand here letter by letter.
        "control": [f"{fanout}{control}"],
        "events": [f"{fanout}{events}/*"],
        "gossip": [f"{fanout}{events}/worker.*"],
    }


# Roles


class Grant(NamedTuple):
    """Commands, as access lists have them, and names of patterns, with spaces between."""

    commands: str
    keys: str = ""
    channels: str = ""

    def spell(self, patterns: Mapping[str, Sequence[str]]) -> list[str]:
        """Where the commands may be run, as access lists have it."""
        keys = [f"~{each}" for name in self.keys.split() for each in patterns[name]]
        return keys + [f"&{each}" for name in self.channels.split() for each in patterns[name]]


DECLARE = Grant(f"+@set +@sortedset {ANY_TYPE} +evalsha -@dangerous", "bindings")

#: Celery's remote control: to revoke a job, to inspect, and so also to shut down.
ASK = (
    DECLARE,
    Grant("+publish", channels="control"),
    Grant(f"+brpop +rpop +llen {ANY_TYPE}", "replies"),
    # A client of kombu that awaits answers also looks for messages that were given up.
    Grant("+set +get +del +evalsha +zrange", "visibility"),
)
LISTEN = (
    Grant("+psubscribe +punsubscribe", channels="events"),
    Grant(f"+llen {ANY_TYPE}", "inboxes"),
)
LOOK = (
    Grant("+llen +lindex", "queues tenants"),
    Grant("+zrange", "tenants workers"),
    Grant("+evalsha", "queues tenants"),
    Grant("+get +zcard +hgetall +hmget +hget", "workers"),
    Grant("+hlen", "letters"),
    # Of what dead workers hold, it counts all and reads some.
    Grant("+evalsha +hlen +hrandfield +hstrlen +hget", "leases"),
    Grant("+zcard", "visibility"),
    Grant("+info"),
)
PRODUCE = (
    *ASK,
    Grant("+lpush +llen", "queues"),
    Grant("+evalsha", "queues markers tenants"),
    Grant("+get +set +del +unlink", "markers"),
    Grant("+get +mget +exists +del +unlink", "results"),
    Grant(f"+@string {ANY_TYPE} -@dangerous", "groups"),
    Grant("+subscribe", channels="results groups"),
    Grant("+publish", channels="groups"),
    Grant(f"+xadd +xread +xtrim +set +sadd {ANY_TYPE}", "streams"),
)
WORK = (
    # The first ones are those of every job, and of whatever its task sends.
    Grant(ALL, "queues markers workers leases tenants results groups streams"),
    Grant("+publish", channels="results groups events"),
    *ASK,
    Grant(ALL, "unacked"),
    Grant(ALL, "cache"),
    Grant(ALL, "rates"),
    # It is told of changes to its queues.
    Grant("+client|tracking +client|caching"),
    # It keeps dead letters, and reads none.
    Grant("+evalsha", "leases letters messages"),
    Grant("+hset", "letters messages"),
    # One command may subscribe to both.
    Grant("+psubscribe +punsubscribe", channels="control gossip"),
    Grant("+subscribe", channels="results groups"),
    Grant("+lpush", "replies"),
    Grant(f"+llen {ANY_TYPE}", "inboxes"),
    Grant("+info"),
)
MONITOR = (
    *(*LOOK, *ASK, *LISTEN),
    # The dead letter of a job, without its message.
    Grant("+hscan +hget", "letters"),
    Grant("+get +exists", "results"),
)

ROLES: Mapping[str, Sequence[Grant]] = {
    "producer": PRODUCE,
    "worker": WORK,
    # CLIENT LIST tells whether workers of plain Celery wait for jobs.
    "gateway": (*PRODUCE, *LOOK, Grant(ALL, "http"), Grant("+client|list")),
    "gateway-worker": (*WORK, Grant(ALL, "http")),
    "monitor": MONITOR,
    "flower": (*LISTEN, *ASK, Grant("+llen", "queues"), Grant("+info")),
    "operator": (
        *(*MONITOR, *PRODUCE),
        Grant("+@hash +evalsha -@dangerous", "letters messages"),
        Grant("+evalsha +lrange +rpush +del +hdel", "queues tenants"),
        Grant("+hscan", "leases unacked"),
        Grant("+memory|usage", "queues tenants"),
        Grant("+config|get +client|list +slowlog|get +latency|latest"),
    ),
}


def list_grants(role: str, space: KeySpace) -> list[Grant]:
    """What a role may do in an app."""
    grants = [*ROLES[role]]
    if role == "gateway" and space.has_own_worker:
        grants += WORK
    if role in ("producer", "gateway", "operator"):
        grants += [Grant("+lindex +zrange", "queues tenants")] * space.reads_ages
        grants += [Grant("+publish", channels="events")] * space.sends_events
        grants += [Grant("+pexpire", "expiring")] * bool(space.expiring)
    return list(dict.fromkeys(grants))


# Lines


def write_user(
    name: str, role: str, space: KeySpace, password: str | None, *, has_selectors: bool
) -> str:
    """A user as a line of Redis's `aclfile`.

    Args:
        name: Of the user.
        role: One of `ROLES`.
        space: The app's.
        password: None for a placeholder, which Redis refuses.
        has_selectors: False for Redis 6.2.

    Raises:
        SettingsError: A key has a character that access lists cannot have.
    """
    patterns, grants = list_patterns(space), list_grants(role, space)
    for pattern in [each for some in patterns.values() for each in some]:
        if any(char.isspace() or char == "\0" for char in pattern):
            raise SettingsError(
                f"{pattern!r} has white space, which no pattern of Redis's access lists can have;"
                " rename the queue, or the prefix"
            )
    hashed = hashlib.sha256(password.encode()).hexdigest() if password else f"SHA256-OF-{name}"
    words = ["user", name, "on", f"#{hashed}", "resetchannels"]
    if has_selectors:
        where = [(each.spell(patterns), each.commands) for each in grants]
        words += [CONNECT_7, *(commands for places, commands in where if not places)]
        words += [f"({' '.join(places)} {commands})" for places, commands in where if places]
        return " ".join(words)
    places = [place for each in grants for place in each.spell(patterns)]
    commands = " ".join([CONNECT_6, *(each.commands for each in grants)]).split()
    # What is taken away would be given again by a category that comes later.
    commands.sort(key=lambda word: ("+@", "-@", "").index(word[:2] if "@" in word else ""))
    return " ".join(dict.fromkeys([*words, *places, *commands]))
