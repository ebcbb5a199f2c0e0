"""The keys that leases need in addition to Celery's own; `lua/` says what is in each of them."""

from collections.abc import Container
from pathlib import Path
from typing import Any
from zlib import crc32

import redis

from batchery.redis_scripts import RedisScripts

#: Name of connections that pop messages and are no worker's: they await the answers of workers.
REPLIES_CLIENT = "batchery-replies"

#: Name of those of workers, whose devices are registered.
WORKER_CLIENT = "batchery-worker"

#: How names of keys begin that are no queue's: Batchery's, kombu's, those of results. Kombu's
#: `unacked` is not among them, as a setting names it.
OWN_NAMES = (
    *("batchery:", "batchery-pieces:", "batchery-reader:", "batchery-wake:", "batchery-woken:"),
    *("_kombu.binding", "celery-task-meta-", "celery-taskset-meta-", "chord-unlock-"),
)

#: Version of the layout of all keys and values that workers share. It grows when a worker of the
#: version before could not live beside this one; docs/security.md says what happens then.
SCHEMA = 2

#: Ends of the names of the lists beside a queue, for what the takers of the queue cannot run: jobs
#: of batch tasks, which are for devices, and those of ordinary tasks, which are for Celery's pool.
BATCHES, ORDINARY = "~batches", "~ordinary"

#: End of the name of the sorted set beside a queue: jobs whose time has not come.
LATER = "~later"

#: Number of lists to which the tenants of a queue and priority step are dealt.
TENANT_LISTS = 8

#: The transport's scripts. The head of each file names its keys, and who writes them.
LUA = Path(__file__).parent / "lua"


def transport_scripts(client: "redis.Redis") -> RedisScripts:
    """The transport's scripts on a client of the broker's database."""
    return RedisScripts(client, LUA)


class Keys:
    """All keys of one broker database."""

    def __init__(self, prefix: str = "") -> None:
        """Names them; `prefix` is kombu's `global_keyprefix`."""
        self.prefix = prefix
        own = f"{prefix}batchery:"
        #: ZSET of worker ids by the time of the last heartbeat.
        self.workers = f"{own}workers"
        #: HASH of worker ids to descriptions.
        self.worker_info = f"{own}worker-info"
        #: STRING: the highest `SCHEMA` of all workers that were ever registered.
        self.schema = f"{own}schema"
        #: STRING: the last token that was given out.
        self.token = f"{own}token"
        #: HASH of task ids to the number of workers that died while the job ran alone.
        self.suspects = f"{own}suspects"
        #: HASH of worker ids to what they wait for.
        self.waiting = f"{own}waiting"
        #: HASH of tokens to queue keys and descriptions of dead letters.
        self.dead = f"{own}dead"
        #: HASH of tokens to the messages of dead letters.
        self.dead_messages = f"{own}dead-messages"

    def lease(self, worker: str) -> str:
        """HASH of tokens to messages that a worker holds."""
        return f"{self.prefix}batchery:lease:{worker}"

    def running(self, worker: str) -> str:
        """HASH of batch numbers to the tokens and ids of the jobs on a device."""
        return f"{self.prefix}batchery:running:{worker}"

    def dedupe_keys(self, publish_tag: str) -> str:
        """SET of the dedupe keys of one job: which messages its completion has published."""
        return f"{self.prefix}batchery:sent:{publish_tag}"

    def queue(self, name: str) -> str:
        """A queue's key, with the prefix that kombu's Redis client adds."""
        return f"{self.prefix}{name}"

    def later(self, name: str) -> str:
        """ZSET of the messages of a queue whose time has not come."""
        return f"{self.prefix}{name}{LATER}"

    def of_recovery(self, worker: str) -> list[str]:
        """The keys that recover.lua takes, in its order."""
        return [
            self.workers,
            self.worker_info,
            self.lease(worker),
            self.running(worker),
            self.suspects,
            self.waiting,
        ]


def tenant_lists(queue: str, sep: str) -> list[str]:
    """The names under which jobs of tenants wait, by number; each has its own priority steps.

    Args:
        queue: Its name.
        sep: What kombu puts between a queue and a priority; so no queue has such a name.
    """
    return [f"{queue}{sep}t{number}" for number in range(TENANT_LISTS)]


def find_tenant_list(queue: str, sep: str, tenant: str) -> str:
    """The one of them in which a tenant's jobs wait."""
    number = crc32(tenant.encode(errors="replace")) % TENANT_LISTS
    return tenant_lists(queue, sep)[number]


def lists_of(channel: Any, queue: str, priorities: Container[int] | None = None) -> list[str]:
    """All lists of a queue: its own, those of tenants, and those beside it; without a key prefix.

    Args:
        channel: A Redis channel of kombu.
        queue: Its name.
        priorities: Of which priority steps; by default of all.
    """
    names = [queue, *tenant_lists(queue, channel.sep), queue + BATCHES, queue + ORDINARY]
    steps = channel.priority_steps
    if priorities is not None:
        steps = [step for step in steps if step in priorities]
    return [channel._q_for_pri(name, step) for step in steps for name in names]


def later_sets(queue: str) -> list[str]:
    """The sets of those jobs of a queue whose time has not come; without a key prefix."""
    return [queue + LATER, queue + BATCHES + LATER]


def fetched_lists(channel: Any, name: str, step: int) -> list[str]:
    """The lists of one priority step from which a device takes; without a key prefix.

    Args:
        channel: A Redis channel of kombu.
        name: Of a queue, or of the list beside it; tenants' jobs are with either.
        step: The priority step.
    """
    names = [name, *tenant_lists(name.removesuffix(BATCHES), channel.sep)]
    return [channel._q_for_pri(each, step) for each in names]


def find_own(name: str) -> str:
    """The queue of a name, which may be that of a list beside it."""
    return name.removesuffix(BATCHES).removesuffix(ORDINARY)


def split_list(name: str, sep: str) -> tuple[str, int]:
    """The queue of a list, whose key has no prefix, and its priority step."""
    head, _, step = name.rpartition(sep)
    name, number = (head, int(step)) if head and step.isdigit() else (name, 0)
    head, _, _ = name.rpartition(sep)
    return (head if head and name in tenant_lists(head, sep) else name), number


def escape_pattern(name: str) -> str:
    """A name as a pattern that only fits this name."""
    return "".join(f"\\{char}" if char in "*?[\\" else char for char in name)
