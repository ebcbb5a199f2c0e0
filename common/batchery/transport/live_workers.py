"""Who consumes the queues of a broker, for those who send: read from Redis, and no worker asked."""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from typing import Annotated, Any, Self

import redis
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchery.redis_scripts import get_database
from batchery.transport import Transport
from batchery.transport.channel import DeviceQueueChannel
from batchery.transport.cluster import SlotMoved
from batchery.transport.redis_schema import REPLIES_CLIENT, WORKER_CLIENT, Keys

#: Commands by which workers with Celery's own transport wait; the last one of a connection counts.
POPS = re.compile(rb" cmd=(?:brpop|blpop|blmpop|brpoplpush|blmove) ")

#: Those of ours that are no plain worker's.
OWN_CLIENTS = (REPLIES_CLIENT.encode(), WORKER_CLIENT.encode())

#: A connection that waited for messages so long ago, in seconds, is that of no idle worker: these
#: ask anew each second, but for one whose only thread runs a job.
MAX_IDLE_S = 30


@dataclass(frozen=True)
class RegisteredWorker:
    """A worker with leases, as it tells others of itself; nothing where that is nonsense.

    Attributes:
        expiry_s: How long it may send none before it counts as dead, in seconds; None if unknown.
        queues: Names of the queues that it consumes; None while that is not known.
        name: Its node name; the same.
        host: Name of its machine.
        version: That of its Batchery.
        leased: How many messages of each queue it held at its last heartbeat.
        silent_s: For how long it had sent no heartbeat, in seconds, on the clock of Redis. Just
            after an outage of Redis all workers were silent.
    """

    expiry_s: Annotated[float, Field(gt=0)] | None = None
    queues: AbstractSet[str] | None = None
    name: str | None = None
    host: str | None = None
    version: str | None = None
    leased: Mapping[str, int] = field(default_factory=dict)
    silent_s: float = 0.0

    @property
    def is_dead(self) -> bool:
        """Whether it was silent for as long as its leases live: others may give back its jobs."""
        return self.silent_s >= (self.expiry_s or DeviceQueueChannel.lease_expiry_s)


_READER = TypeAdapter(RegisteredWorker)


class LiveWorkers:
    """Reads from the broker's Redis which workers there are; from one thread."""

    def __init__(self, client: Any, prefix: str, unacked: str = "unacked_index") -> None:
        """Asks Redis nothing yet.

        Args:
            client: A client of the broker's database.
            prefix: Kombu's `global_keyprefix`.
            unacked: Kombu's `unacked_index_key`: what workers without leases hold.
        """
        self._client = client
        self._keys = Keys(prefix)
        self._unacked = f"{prefix}{unacked}"
        self._db = b"%d" % get_database(client.connection_pool)

    @classmethod
    def of(cls, connection: Any, timeout_s: float) -> Self | None:
        """Those of an open kombu connection's broker; None if it is not a Redis.

        Args:
            connection: Is needed no longer than this call.
            timeout_s: How long Redis may take for an answer, in seconds.
        """
        if not isinstance(connection.transport, Transport):
            return None
        channel = connection.default_channel
        client = channel._make_separate_client(timeout_s)
        client.connection_pool.connection_kwargs["retry"] = Retry(NoBackoff(), 2, (SlotMoved,))
        return cls(client, channel.global_keyprefix, channel.unacked_index_key)

    def registered(self) -> Mapping[str, RegisteredWorker]:
        """The workers with leases, by id, the dead among them; one round trip.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        with self._client.pipeline(transaction=False) as pipe:
            pipe.zrange(self._keys.workers, 0, -1, withscores=True)
            pipe.hgetall(self._keys.worker_info)
            pipe.time()
            heartbeats, infos, (now_s, now_us) = pipe.execute()
        now_s += now_us / 1e6
        return {
            worker.decode(): read_worker(infos.get(worker), now_s - beat / 1e3)
            for worker, beat in heartbeats
        }

    def may_be_others(self) -> bool:
        """Whether workers without leases may be there, with Celery's own transport.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        try:
            # As two words, so that redis-py does not take thousands of lines to pieces.
            clients = self._client.execute_command("CLIENT", "LIST")
        except redis.ResponseError:
            return True  # This user may not see who is connected.
        waiting = [
            dict(field.split(b"=", 1) for field in line.split())
            for line in clients.splitlines()
            if POPS.search(line)
        ]
        idle_s = [
            int(each[b"idle"])
            for each in waiting
            if each[b"db"] == self._db and each[b"name"] not in OWN_CLIENTS
        ]
        # One that is busy holds messages. Others have once awaited the answers of workers.
        return bool(idle_s) and (min(idle_s) < MAX_IDLE_S or self._client.zcard(self._unacked) > 0)


def read_worker(about: bytes | None, silent_s: float = 0.0) -> RegisteredWorker:
    """A worker by its entry in worker-info, and the time since its last heartbeat."""
    try:
        return replace(_READER.validate_json(about or b"{}"), silent_s=silent_s)
    except ValidationError:
        return RegisteredWorker(silent_s=silent_s)
