"""The families of keys that a deployment has in Redis: those of its access lists. Pure."""

from fnmatch import fnmatchcase

from batchery.access import KeySpace, list_patterns

#: The names that access lists have for channels; they are no keys.
CHANNELS = ("control", "events", "gossip")

#: What the harness itself keeps there.
OWN = "chaos:*"

#: Families whose keys' members are the jobs under way: how many there are is a matter of load.
UNDER_WAY = ("batchery:lease:*", "batchery:running:*")


class Families:
    """Which family a key is of."""

    def __init__(self, queue: str) -> None:
        """Lists them.

        Args:
            queue: The queue that the workers consume.
        """
        names = list_patterns(KeySpace(queues=[queue]))
        #: Patterns of the keys; the first one that fits counts.
        self.patterns = [
            pattern
            for name, patterns in names.items()
            if name not in CHANNELS
            for pattern in patterns
        ]
        self._queues = set(names["queues"])
        self._known: dict[str, str | None] = {}

    def find(self, key: str) -> str | None:
        """The family of a key, as a pattern; None if no family has it."""
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
