"""Names of the keys that the leases need beside Celery's own; what is in them stands in `lua/`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of one broker database; `prefix` is kombu's `global_keyprefix`."""

    prefix: str = ""

    @property
    def workers(self) -> str:
        """ZSET of worker ids by last heartbeat."""
        return f"{self.prefix}batchery:workers"

    @property
    def worker_info(self) -> str:
        """HASH of worker ids to descriptions."""
        return f"{self.prefix}batchery:worker-info"

    @property
    def token(self) -> str:
        """STRING, the last token given."""
        return f"{self.prefix}batchery:token"

    @property
    def suspects(self) -> str:
        """HASH of task ids to deaths."""
        return f"{self.prefix}batchery:suspects"

    @property
    def dead(self) -> str:
        """HASH of tokens to queue keys and descriptions of dead letters."""
        return f"{self.prefix}batchery:dead"

    @property
    def dead_messages(self) -> str:
        """HASH of tokens to the messages of dead letters."""
        return f"{self.prefix}batchery:dead-messages"

    def lease(self, worker: str) -> str:
        """HASH of tokens to messages that a worker holds."""
        return f"{self.prefix}batchery:lease:{worker}"

    def running(self, worker: str) -> str:
        """HASH of batch ids to the tokens that are on a device."""
        return f"{self.prefix}batchery:running:{worker}"

    def sent(self, publish_tag: str) -> str:
        """SET of marks of what the completion of one job has sent."""
        return f"{self.prefix}batchery:sent:{publish_tag}"

    def queue(self, name: str) -> str:
        """A queue's key, as kombu's Redis client spells it."""
        return f"{self.prefix}{name}"

    def of_recovery(self, worker: str) -> list[str]:
        """What recover.lua takes, in its order."""
        return [
            self.workers,
            self.worker_info,
            self.lease(worker),
            self.running(worker),
            self.suspects,
        ]
