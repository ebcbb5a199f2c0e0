"""The families of keys that a deployment has in Redis, as docs/leases.md lists them. Pure."""

from fnmatch import fnmatchcase

from benchmarks.redis_clients import strip_tag

#: Of a queue: its lists, for each priority and for its tenants; jobs of the other kind, and those
#: whose time has not come.
QUEUES = (
    *("{0}", "{0}[^!-~][^!-~]*", "{0}~batches", "{0}~ordinary"),
    *("{0}~later", "{0}~batches~later"),
)

#: All others. The first one that fits a key counts.
PATTERNS = (
    *("_kombu.binding*", "unacked*", "*.reply.celery.pidbox*", "*celery.pidbox*", "celeryev*"),
    *("batchery:publisher:*", "batchery:workers", "batchery:worker-info"),
    *("batchery:schema", "batchery:token", "batchery:suspects", "batchery:waiting"),
    *("batchery:lease:*", "batchery:running:*", "batchery:sent:*", "batchery:dead"),
    *("batchery:dead-messages", "batchery:rate:*", "batchery:cache*", "batchery:http*"),
    *("celery-task-meta-*", "celery-taskset-meta-*", "chord-unlock-*", "batchery:reply:*"),
    *("batchery-pieces:*", "batchery-reader:*", "batchery-wake:*", "batchery-woken:*"),
)

#: What the harness itself keeps there.
OWN = "chaos:*"

#: Families whose keys' members are the jobs under way: how many there are is a matter of load.
UNDER_WAY = ("batchery:lease:*", "batchery:running:*")


class Families:
    """Which family a key is of."""

    def __init__(self, *queues: str) -> None:
        """Lists them.

        Args:
            queues: The queues that the workers consume.
        """
        own = [each.format(queue) for queue in queues for each in QUEUES]
        self._queues = set(own)
        #: Patterns of the keys; the first one that fits counts.
        self.patterns = [*own, *PATTERNS]
        self._known: dict[str, str | None] = {}

    def find(self, key: str) -> str | None:
        """The family of a key, as a pattern; None if no family has it."""
        key = strip_tag(key)
        if key.startswith(OWN[:-1]):
            return OWN
        # Results are so many that most keys are found in the first comparison.
        if key.startswith("celery-task-meta-"):
            return "celery-task-meta-*"
        if key not in self._known:
            fits = (each for each in self.patterns if fnmatchcase(key, each.replace("[^", "[!")))
            self._known[key] = next(fits, None)
        return self._known[key]

    def counts_jobs(self, family: str) -> bool:
        """Whether the members of a family's keys are jobs that wait or run."""
        return family in UNDER_WAY or family in self._queues
