"""The leases of a worker's devices: kept alive, and given back when their holder is dead."""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import redis
from celery import Celery

from batchery.fork_gate import fork_gate
from batchery.shards import Shard
from batchery.transport.channel import SOCKET_TIMEOUT_S
from batchery.transport.live_workers import read_worker
from batchery.transport.membership import BEATS_PER_EXPIRY, CAUTION, FailureDetector
from batchery.transport.redis_schema import Keys, transport_scripts
from batchery.transport.suspects import build_expired_field, encode_id
from batchery_worker.brokers import list_places, open_channel
from batchery_worker.device_pool.fleet import Fleet, Holding
from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.device_pool.watched import WatchedBatch
from batchery_worker.ipc.messages import Joined, Parted, Reply

logger = logging.getLogger("batchery.pool")


class HolderBeats(Holding):
    """Renews the leases of devices, and recovers those of dead holders, with each broker."""

    def __init__(self, app: Celery, fleet: Fleet) -> None:
        """Starts nothing yet.

        Args:
            app: Its brokers are asked.
            fleet: Has the devices.
        """
        self._places = [PlaceBeats(app, each, fleet.fence) for each in list_places(app)]

    def start(self) -> None:
        """Starts the threads; that of a shard when a device has joined it, as few are used."""
        for each in self._places:
            if not each.place.is_apart:
                each.start()

    def handle(self, device: DeviceProcess, reply: Reply) -> None:
        """Beats for a device's holders: another one after it was fenced, or with each broker."""
        if isinstance(reply, Joined):
            beats = self._places[reply.place]
            beats.holders[reply.holder] = device
            beats.start()
        elif isinstance(reply, Parted):
            for each in self._places:
                each.holders.pop(reply.holder, None)

    def leave(
        self, device: DeviceProcess, batches: Sequence[WatchedBatch], *, is_death: bool
    ) -> None:
        """Gives back what a device held."""
        expired = {
            each.told.job_ids[0]: each.told.hard_limit_s or 0.0
            for each in batches
            if each.was_too_long
        }
        for beats in self._places:
            for holder, holding in [*beats.holders.items()]:
                if holding is device:
                    beats.end(holder, expired, is_death=is_death)

    def stop(self) -> None:
        """Gives back what is left, and ends the threads."""
        for each in self._places:
            for device in {*each.holders.values()}:
                self.leave(device, (), is_death=False)
        for each in self._places:
            each.stop()

    @property
    def recovered(self) -> int:
        """How many messages of dead holders are back in their queues."""
        return sum(each.recovered for each in self._places)

    @property
    def serving(self) -> "PlaceBeats":
        """The heartbeat with the broker in use."""
        return next((each for each in self._places if each.holders), self._places[0])


class PlaceBeats:
    """The thread that does so with one broker."""

    def __init__(
        self, app: Celery, place: Shard, on_fenced: Callable[[DeviceProcess, str], None]
    ) -> None:
        self._app = app
        self.place = place
        self._on_fenced = on_fenced
        #: Id by which leases are held -> device; any thread adds and removes them.
        self.holders: dict[str, DeviceProcess] = {}
        #: Holders that have ended: the limits that their jobs have reached, and whether it was a
        #: death.
        self._ended: list[tuple[str, dict[str, float], bool]] = []
        self._stopped = threading.Event()
        self._changed = threading.Event()
        self._client: Any = None
        #: Holders whose jobs this user may not give back, which the log has once.
        self._left: set[str] = set()
        self.recovered = 0
        #: After how long a silence others take the leases, in seconds.
        self.expiry_s = 5.0
        #: When the last heartbeat was answered; None before the first one.
        self.beat_s: float | None = None
        #: Whether the last one was not answered.
        self.is_silent = False
        self._thread = threading.Thread(target=self._run, name="batchery-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread, unless it has started."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self, holder: str, expired: dict[str, float], *, is_death: bool) -> None:
        """Gives back what a holder had.

        Args:
            holder: Its id.
            expired: Id of a job that has reached its hard time limit -> that limit, in seconds.
            is_death: As of `Holding.leave`.
        """
        self.holders.pop(holder, None)
        self._ended.append((holder, expired, is_death))
        self._changed.set()

    def stop(self) -> None:
        """Ends the thread when all is given back, or the broker is away."""
        self._stopped.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(SOCKET_TIMEOUT_S)

    def _connect(self) -> None:
        with open_channel(self._app, self.place) as channel:
            self.keys = Keys(channel.global_keyprefix)
            self.expiry_s = float(channel.lease_expiry_s)
            self._client = channel._make_separate_client(self.expiry_s / 2)
        self._scripts = transport_scripts(self._client)
        self._detector = FailureDetector(self.expiry_s, max_gap_s=self.expiry_s / 2)

    def _run(self) -> None:
        pause_s = 0.2
        while not (self._stopped.is_set() and not self._ended):
            try:
                with fork_gate.working():
                    if self._client is None:
                        self._connect()
                    pause_s = self.expiry_s / BEATS_PER_EXPIRY
                    self._recover_ended()
                    if self._stopped.is_set():
                        break
                    self._beat(monotonic())
            except (redis.RedisError, OSError) as error:
                logger.debug("heartbeat: %r", error)
                self.is_silent = True
                if self._client is not None:
                    self._detector.reset()
                if self._stopped.is_set():
                    break
            except Exception:
                logger.exception("heartbeat failed")
            self._changed.wait(pause_s)
            self._changed.clear()
        if self._client is not None:
            self._client.connection_pool.disconnect()

    def _beat(self, now_s: float) -> None:
        """Renews the leases of all devices, and observes the other holders."""
        holders, flat = dict(self.holders), None
        for holder, device in holders.items():
            flat = self._scripts.run(
                "renew", [self.keys.workers, self.keys.worker_info], holder, ""
            )
            if flat is None and holder in self.holders:
                self._on_fenced(device, holder)
        if not holders:
            flat = self._client.zrange(self.keys.workers, 0, -1, withscores=True)
            flat = list(itertools.chain.from_iterable(flat))
        self.beat_s, self.is_silent = monotonic(), False
        if flat is None:
            return
        pairs = zip(flat[::2], flat[1::2], strict=True)
        beats = {name.decode(): int(float(beat)) for name, beat in pairs}
        others = {name: beat for name, beat in beats.items() if name not in holders}
        infos: Any = self._client.hmget(self.keys.worker_info, [*others]) if others else ()
        known = dict(zip(others, map(read_worker, infos), strict=True))
        expiries_s = {name: each.expiry_s or self.expiry_s for name, each in known.items()}
        for name, beat in self._detector.observe(others, now_s, expiries_s):
            # Just after an outage many live holders look dead: like this one, they lost the
            # connection.
            counts = self._detector.undisturbed_s(now_s) >= 2 * self.expiry_s
            self._recover(name, str(beat), is_death=counts)

    def _recover_ended(self) -> None:
        while self._ended:
            holder, expired, is_death = self._ended[0]
            fields = {
                build_expired_field(encode_id(task_id)): limit_s
                for task_id, limit_s in expired.items()
            }
            if fields:
                self._client.hset(self.keys.suspects, mapping=fields)
            self._recover(holder, "", is_death=is_death)
            self._ended.pop(0)

    def _recover(self, holder: str, beat: str, *, is_death: bool) -> None:
        """Gives back what a holder had.

        Args:
            holder: Its id.
            beat: Its last heartbeat, which must be that still; empty for one that surely has ended.
            is_death: Whether what it ran may have killed it.
        """
        name = read_worker(self._client.hget(self.keys.worker_info, holder)).name or holder
        try:
            answer: Any = self._scripts.run(
                "recover", self.keys.of_recovery(holder), holder, beat, int(is_death)
            )
        except redis.ResponseError as error:
            if holder not in self._left:
                self._left.add(holder)
                logger.error(
                    "worker %s is dead, and its jobs cannot go back to their queues: %s; see"
                    " `batchery acl -Q` for what the user of a worker must be allowed",
                    *(name, error),
                )
            return
        if answer is None:
            return
        count, suspects = answer
        self.recovered += count
        if not count and not beat:
            return
        why = f"; {suspects} were on a device and may have killed it: {CAUTION}" if suspects else ""
        logger.warning(
            "worker %s is dead; its jobs are back in their queues: %d%s", name, count, why
        )
