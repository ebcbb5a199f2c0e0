"""The keys that leases need in addition to Celery's own; `lua/` says what is in each of them."""

from dataclasses import dataclass
from pathlib import Path

import redis

from batchery.redis_scripts import RedisScripts

#: The transport's scripts. The head of each file names its keys, and who writes them.
LUA = Path(__file__).parent / "lua"


def transport_scripts(client: "redis.Redis") -> RedisScripts:
    """The transport's scripts on a client of the broker's database."""
    return RedisScripts(client, LUA)


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
        """STRING, the last token that was given."""
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

    def dedupe_keys(self, publish_tag: str) -> str:
        """SET of dedupe keys: what the completion of one job has published."""
        return f"{self.prefix}batchery:sent:{publish_tag}"

    def queue(self, name: str) -> str:
        """A queue's key, as kombu's Redis client spells it."""
        return f"{self.prefix}{name}"

    def of_recovery(self, worker: str) -> list[str]:
        """The keys that recover.lua takes, in its order."""
        return [
            self.workers,
            self.worker_info,
            self.lease(worker),
            self.running(worker),
            self.suspects,
        ]
