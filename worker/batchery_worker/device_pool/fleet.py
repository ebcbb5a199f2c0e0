"""The devices of a worker: started, watched, kept alive in Redis, and ordered.

Everything of a device is on the thread of one loop, which is idle while devices work: a device
tells only of batches whose time is limited. Another thread beats for the leases of all devices.
"""

import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any, Protocol

import redis
from celery import Celery
from celery.worker import state as worker_state
from kombu.asynchronous import Hub

from batchery.errors import StartError
from batchery.fork_gate import fork_gate
from batchery.protocol.figures import (
    BatchFigures,
    BatchSums,
    LeaseFigures,
    add,
    read_figures,
    report,
)
from batchery.settings import Settings
from batchery.transport.channel import SOCKET_TIMEOUT_S
from batchery.transport.membership import BEATS_PER_EXPIRY, CAUTION, FailureDetector
from batchery.transport.redis_schema import Keys, find_own, transport_scripts
from batchery.transport.suspects import build_expired_field, encode_id
from batchery.transport.worker_registry import read_expiry, read_text
from batchery_worker.brokers import list_brokers, open_channel
from batchery_worker.device_pool.control import DeviceControl
from batchery_worker.device_pool.process import (
    LEAVE_TIMEOUT_S,
    DeviceProcess,
    State,
    WatchedBatch,
)
from batchery_worker.device_pool.supervisor import DeviceSupervisor
from batchery_worker.ipc.messages import (
    Answer,
    Fenced,
    Joined,
    Order,
    Parted,
    Ready,
    Stop,
)

logger = logging.getLogger("batchery.pool")

#: Commands whose effect ends with the process, and what they are about.
LASTING = {
    "rate_limit": "rate",
    "time_limit": "time",
    "enable_events": "events",
    "disable_events": "events",
}

#: How long the answers of devices are waited for, in seconds: one may be held by its function.
ANSWER_S = 1.0


class BusyDevices:
    """Stands for the jobs of devices among the active requests of Celery's worker."""

    acknowledged = True
    id = name = "batchery"
    #: What Celery asks of it where a connection is lost.
    task = SimpleNamespace(acks_late=False)

    def cancel(self, *_: Any, **__: Any) -> None:
        """Does nothing: the worker ends its devices."""

    def info(self, **_: Any) -> None:
        """Nothing: devices tell of their jobs."""


class Holding(Protocol):
    """What knows the jobs that devices have: leases of them, or messages of Celery's consumer."""

    @property
    def recovered(self) -> int:
        """How many messages of dead holders are back in their queues."""

    @property
    def expiry_s(self) -> float:
        """After how long a silence others take the leases of devices, in seconds."""

    @property
    def beat_s(self) -> float | None:
        """When the last heartbeat was answered; None before the first one."""

    @property
    def is_silent(self) -> bool:
        """Whether the last one was not answered."""

    def start(self) -> None:
        """Begins to keep them."""

    def leave(self, device: str, batches: Sequence[WatchedBatch], *, is_death: bool) -> None:
        """Gives back what a device had; see `HolderBeats.leave`."""

    def stop(self) -> None:
        """Gives back what is left."""


class Fleet:
    """All devices of a worker."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        devices: Sequence[DeviceProcess],
        make_holding: "Callable[[Fleet], Holding]",
        on_lost: Callable[[str], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            app: The worker's.
            settings: Of the worker.
            devices: None of them has been started.
            make_holding: Makes what knows the jobs of devices.
            on_lost: Called when the worker must end, with the reason for people.
        """
        self._settings = settings
        self._hub: Any = Hub()
        self.supervisor = DeviceSupervisor(
            *(devices, settings.max_pass_s),
            on_end=self._on_end,
            on_busy=self._note_busy,
            on_lost=on_lost,
        )
        self._take_ready = self.supervisor.handlers[Ready]
        self.supervisor.handlers |= {Answer: self._on_answer, Ready: self._on_readiness}
        #: The last of the commands that change a process, by what they are about.
        self._changes: dict[tuple[str, Any], Order] = {}
        self._numbers = itertools.count(1)
        self._answered = threading.Condition()
        self._answers: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, name="batchery-devices", daemon=True)
        self.control = DeviceControl(app, self.supervisor)
        self._is_leaving = False
        #: The last figures of each device's process, and what all processes before had counted.
        self._known: dict[str, dict[str, Any]] = {}
        self._past: dict[str, Any] | None = None
        self.restarts = 0
        self._busy = BusyDevices()
        self.beats = make_holding(self)

    # Start

    def start(self, check: Callable[[], None], *, waits: bool) -> None:
        """Starts the devices; waits for their models, if there is nothing else to do.

        Raises:
            StartError: A device cannot start; says why.
        """
        self.beats.start()
        if waits:
            self._start_and_wait(check)
        else:
            self.supervisor.begin(self._settings.device_start_timeout_s)
            self._thread.start()

    def _start_and_wait(self, check: Callable[[], None]) -> None:
        failure: list[BaseException] = []
        is_over = threading.Event()
        is_interrupted = threading.Event()

        def interrupted() -> None:
            if is_interrupted.is_set():
                raise StartError("the worker was told to stop")

        def begin() -> None:
            # Devices die with the thread that has started them, so it is the one that goes on.
            try:
                self.supervisor.start(self._hub, self._settings.device_start_timeout_s, interrupted)
            except BaseException as error:  # noqa: BLE001 - raised on the other thread
                failure.append(error)
            finally:
                is_over.set()

        self._begin = begin
        self._thread.start()
        try:
            while not is_over.wait(0.05):
                check()
        except BaseException:
            is_interrupted.set()
            raise
        if failure:
            raise failure[0]

    _begin: Callable[[], None] | None = None

    def _run(self) -> None:
        self._hub._loop_thread = threading.get_ident()
        if self._begin is not None:
            self._begin()
        self.supervisor.run_on(self._hub)
        self._hub.run_forever()

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function on the loop's thread; from any thread."""
        self._hub.call_soon(function)

    # What devices say

    def _note_busy(self) -> None:
        """Lets a soft shutdown of Celery's wait for devices as for its own jobs."""
        if any(device.batches for device in self.supervisor.devices):
            worker_state.active_requests.add(self._busy)
        else:
            worker_state.active_requests.discard(self._busy)

    def tell_fenced(self, name: str, holder: str) -> None:
        """Tells a device that others have the leases of a holder; from any thread."""

        def tell() -> None:
            for device in self.supervisor.devices:
                if device.name == name:
                    self.supervisor.order(device, Fenced(holder))

        self.call(tell)

    def _on_end(
        self, device: DeviceProcess, batches: Sequence[WatchedBatch], is_death: bool
    ) -> None:
        self.restarts += is_death
        if known := self._known.pop(device.name, None):
            ended = without_jobs(known)
            self._past = add_up([ended, self._past] if self._past else [ended])
        self.beats.leave(device.name, batches, is_death=is_death and not self._is_leaving)

    def _on_answer(self, _: DeviceProcess, answer: Answer) -> None:
        if not answer.number:
            return  # A sign of life.
        with self._answered:
            self._answers[answer.number] = answer.value
            self._answered.notify_all()

    def _on_readiness(self, device: DeviceProcess, reply: Ready) -> None:
        for order in [*self._changes.values()]:
            self.supervisor.order(device, order)
        self._take_ready(device, reply)

    # Orders

    def change(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """As `ask`; if the command lasts, processes that start later run it, too."""
        if (about := LASTING.get(name)) is not None:
            self._changes[about, options.get("task_name")] = Order(0, name, options)
        return self.ask(name, options)

    def ask(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Has a command run by all devices; their answers, by the names of those that gave one."""
        numbers: dict[int, str] = {}

        def send() -> None:
            for number, device in asked:
                self.supervisor.order(device, Order(number, name, options))

        asked = [
            (next(self._numbers), device)
            for device in [*self.supervisor.devices]
            if device.state is State.READY
        ]
        numbers = {number: device.name for number, device in asked}
        if not numbers:
            return {}
        self.call(send)
        with self._answered:
            self._answered.wait_for(lambda: numbers.keys() <= self._answers.keys(), ANSWER_S)
            found = {name: self._answers.pop(number, None) for number, name in numbers.items()}
        return {name: json.loads(value) for name, value in found.items() if value is not None}

    @property
    def devices(self) -> Sequence[DeviceProcess]:
        """Those that were not given up."""
        return self.supervisor.devices

    @property
    def queues(self) -> Sequence[str]:
        """Names of the queues that devices take from."""
        setups = [each.setup.jobs for each in self.supervisor.devices]
        return sorted({find_own(name) for setup in setups for name in setup.queues})

    def figures(self) -> dict[str, Any]:
        """What `celery inspect batchery` shows, and how many jobs of each task there were."""
        self._known.update(self.ask("batchery", {}))
        devices = [*self.supervisor.devices, *self.supervisor.given_up]
        found = [self._known[each.name] for each in devices if each.name in self._known]
        return merge(found, devices, self._past, self.restarts, self.beats)

    def reload(self, number: str, task: str, **options: Any) -> dict[str, Any]:
        """Begins to load another version of a model, and says how far that is."""
        self.call(partial(self.control.reload, number, task, **options))
        return self.control.report(number)

    def recycle(self, modules: Sequence[str]) -> None:
        """Gives every device a fresh process, which imports these modules; no job is lost."""
        self.call(partial(self.supervisor.recycle, modules))

    def take_from(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Has all devices take from these queues, each with the tasks whose jobs come by it."""
        for device in self.supervisor.devices:
            jobs = device.setup.jobs.with_queues(sizes)
            device.setup = replace(device.setup, jobs=jobs)
        self.ask("batchery_queues", {"sizes": sizes})

    def stop_taking(self) -> None:
        """Has all devices take nothing more."""
        self._is_leaving = True

        def stop() -> None:
            self.supervisor.stop_restarting()
            for device in self.supervisor.devices:
                if device.link is None:
                    continue
                if device.state is State.STARTING:
                    # It hears of it once it has started, which may take long.
                    kill = self.supervisor._kill_if_leaving
                    self._hub.call_later(LEAVE_TIMEOUT_S, kill, device, device.pid)
                device.state = State.LEAVING
                self.supervisor.order(device, Stop())

        self.call(stop)

    # The end

    def stop(self, is_cold: Callable[[], bool]) -> None:
        """Waits until the devices have finished what they have begun, and ends them."""
        self.stop_taking()
        pause = threading.Event()
        while not is_cold() and any(device.link for device in self.supervisor.devices):
            pause.wait(0.02)
        self._leave(kill_at_once=True)

    def terminate(self) -> None:
        """Kills the devices; what they hold goes back to the queues."""
        self._is_leaving = True
        self._leave(kill_at_once=True)

    def _leave(self, *, kill_at_once: bool) -> None:
        self._hub.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._hub.call_soon(lambda: None)
            self._thread.join(LEAVE_TIMEOUT_S)
        self.supervisor.stop(kill_at_once=kill_at_once)
        self.beats.stop()


class HolderBeats:
    """Renews the leases of devices, and recovers those of dead holders, with each broker."""

    def __init__(self, app: Celery, fleet: Fleet) -> None:
        """Starts nothing yet.

        Args:
            app: Its brokers are asked.
            fleet: Has the devices.
        """
        handlers = fleet.supervisor.handlers
        handlers[Joined], handlers[Parted] = self._on_joined, self._on_parted
        self._brokers = [BrokerBeats(app, each, fleet.tell_fenced) for each in list_brokers(app)]
        #: Each device's holders, and the broker of each: it may have left one with jobs that run.
        self._holders: dict[str, dict[str, BrokerBeats]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the threads."""
        for each in self._brokers:
            each.start()

    def join(self, device: str, holder: str, broker: int) -> None:
        """Beats for a device from now on; its id is another one after it was fenced."""
        with self._lock:
            self._holders.setdefault(device, {})[holder] = self._brokers[broker]
        self._brokers[broker].join(device, holder)

    def part(self, device: str, holder: str) -> None:
        """Beats no longer for a holder that has no leases."""
        with self._lock:
            beats = self._holders.get(device, {}).pop(holder, None)
        if beats is not None:
            beats.part(holder)

    def _on_joined(self, device: DeviceProcess, reply: Joined) -> None:
        self.join(device.name, reply.holder, reply.broker)

    def _on_parted(self, device: DeviceProcess, reply: Parted) -> None:
        self.part(device.name, reply.holder)

    def leave(self, device: str, batches: Sequence[WatchedBatch], *, is_death: bool) -> None:
        """Gives back what a device held whose process has ended.

        Args:
            device: Its name.
            batches: Those of which it has told, and which had not ended.
            is_death: Whether what it ran may have killed it.
        """
        expired = [
            (each.told.job_ids[0], each.told.hard_limit_s) for each in batches if each.was_too_long
        ]
        with self._lock:
            holders = self._holders.pop(device, {})
        for holder, beats in holders.items():
            beats.end(holder, expired, is_death=is_death)

    def stop(self) -> None:
        """Gives back what is left, and ends the threads."""
        for device in list(self._holders):
            self.leave(device, (), is_death=False)
        for each in self._brokers:
            each.stop()

    @property
    def recovered(self) -> int:
        """How many messages of dead holders are back in their queues."""
        return sum(each.recovered for each in self._brokers)

    @property
    def _serving(self) -> "BrokerBeats":
        return next((each for each in self._brokers if each.holders), self._brokers[0])

    @property
    def expiry_s(self) -> float:
        """After how long a silence others take the leases of devices, in seconds."""
        return self._serving.expiry_s

    @property
    def beat_s(self) -> float | None:
        """When the last heartbeat was answered; None before the first one."""
        return self._serving.beat_s

    @property
    def is_silent(self) -> bool:
        """Whether the last one was not answered."""
        return self._serving.is_silent


class BrokerBeats:
    """The thread that does so with one broker."""

    def __init__(
        self, app: Celery, broker: str | None, on_fenced: Callable[[str, str], None]
    ) -> None:
        self._app = app
        self._broker = broker
        self._on_fenced = on_fenced
        #: Id by which leases are held -> device.
        self.holders: dict[str, str] = {}
        self._ended: list[tuple[str, Sequence[tuple[str, float | None]], bool]] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._changed = threading.Event()
        self._client: Any = None
        self._expiries_s: dict[str, float] = {}
        self._left: set[str] = set()
        self.recovered = 0
        self.expiry_s = 5.0
        self.beat_s: float | None = None
        self.is_silent = False
        self._thread = threading.Thread(target=self._run, name="batchery-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self, device: str, holder: str) -> None:
        """Beats for a holder from now on."""
        with self._lock:
            self.holders[holder] = device

    def part(self, holder: str) -> None:
        """Beats for a holder no longer."""
        with self._lock:
            self.holders.pop(holder, None)

    def end(
        self, holder: str, expired: Sequence[tuple[str, float | None]], *, is_death: bool
    ) -> None:
        """Gives back what a holder had; see `HolderBeats.leave`."""
        with self._lock:
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
        with open_channel(self._app, self._broker) as channel:
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
                    self.beat(monotonic())
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

    def beat(self, now_s: float) -> None:
        """Renews the leases of all devices, and observes the other holders."""
        with self._lock:
            holders = dict(self.holders)
        flat: Any = []
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
        heartbeats = {
            name.decode(): int(float(beat))
            for name, beat in zip(flat[::2], flat[1::2], strict=True)
            if name.decode() not in holders
        }
        expiries_s = self._read_expiries(heartbeats)
        for name, beat in self._detector.observe(heartbeats, now_s, expiries_s):
            self._recover_dead(name, beat, now_s)

    def _read_expiries(self, workers: Mapping[str, int]) -> Mapping[str, float]:
        unknown = [worker for worker in workers if worker not in self._expiries_s]
        if unknown:
            infos: Any = self._client.hmget(self.keys.worker_info, unknown)
            for worker, about in zip(unknown, infos, strict=True):
                self._expiries_s[worker] = read_expiry(about) or self.expiry_s
        self._expiries_s = {worker: self._expiries_s[worker] for worker in workers}
        return self._expiries_s

    def _recover_dead(self, worker: str, beat: int, now_s: float) -> None:
        # Just after an outage many live holders look dead: like this one, they lost the connection.
        counts = self._detector.undisturbed_s(now_s) >= 2 * self.expiry_s
        self._recover(worker, str(beat), is_death=counts)

    def _recover_ended(self) -> None:
        while self._ended:
            holder, expired, is_death = self._ended[0]
            fields = {
                build_expired_field(encode_id(task_id)): limit_s or 0.0
                for task_id, limit_s in expired
            }
            if fields:
                self._client.hset(self.keys.suspects, mapping=fields)
            self._recover(holder, "", is_death=is_death)
            self._ended.pop(0)

    def _recover(self, worker: str, beat: str, *, is_death: bool) -> None:
        about: Any = self._client.hget(self.keys.worker_info, worker)
        try:
            answer: Any = self._scripts.run(
                "recover", self.keys.of_recovery(worker), worker, beat, int(is_death)
            )
        except redis.ResponseError as error:
            if worker not in self._left:
                self._left.add(worker)
                logger.error(
                    "worker %s is dead, and its jobs cannot go back to their queues: %s; see"
                    " `batchery acl -Q` for what the user of a worker must be allowed",
                    *(read_text(about, "name") or worker, error),
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
            "worker %s is dead; its jobs are back in their queues: %d%s",
            *(read_text(about, "name") or worker, count, why),
        )


#: What a worker knows better of a device than that itself.
OF_PROCESS = ("state", "error", "pid", "load_s", "resident_kib")


def merge(
    found: Sequence[Mapping[str, Any]],
    devices: Sequence[DeviceProcess],
    past: Mapping[str, Any] | None,
    restarts: int,
    beats: "Holding",
) -> dict[str, Any]:
    """The figures of a worker, made of those of its devices.

    Args:
        found: Of each device's process.
        devices: All of them.
        past: What earlier processes have counted.
        restarts: Number of deaths.
        beats: Knows what was recovered.
    """
    whole = add_up([*found, past] if past else found)
    for device in devices:
        known = whole["devices"].get(device.name, {"done": report(BatchSums())})
        own = device.figures()
        whole["devices"][device.name] = {**own, **known, **{key: own[key] for key in OF_PROCESS}}
    whole["batches"]["device_restarts"] += restarts
    whole["leases"]["recovered"] += beats.recovered
    return whole


def add_up(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds figures of devices; of several of the same device, the first ones are current."""
    batches, leases, total = BatchFigures(), LeaseFigures(), Counter[str]()
    costs: dict[str, Any] = {}
    devices: dict[str, Any] = {}
    done: dict[str, BatchSums] = {}
    by_queue: dict[str, Any] = {}
    oldest_s: list[float] = []
    for each in found:
        read = read_figures(each)
        if read is None:
            continue
        batches = add(batches, read.batches)
        leases = add(leases, read.leases)
        total.update(each["total"])
        costs = {**each["costs"], **costs}
        devices = {**each["devices"], **devices}
        for name, device in read.devices.items():
            done[name] = add(done.get(name, BatchSums()), device.done)
        if read.oldest_waiting_s is not None:
            oldest_s.append(read.oldest_waiting_s)
        for queue, waiting in each["waiting_by_queue"].items():
            known = by_queue.setdefault(queue, {"jobs": 0, "oldest_s": 0.0})
            known["jobs"] += waiting["jobs"]
            known["oldest_s"] = max(known["oldest_s"], waiting["oldest_s"])
    return {
        "devices": {name: {**devices[name], "done": report(sums)} for name, sums in done.items()},
        "costs": costs,
        "clock_s": round(monotonic(), 3),
        "waiting": sum(each["waiting"] for each in found),
        "oldest_waiting_s": max(oldest_s, default=None),
        "waiting_by_queue": by_queue,
        "batches": report(batches),
        "leases": report(leases),
        "total": dict(total),
    }


def without_jobs(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What a process had counted that has ended: it holds nothing any more."""
    nothing: dict[str, Any] = {"waiting": 0, "oldest_waiting_s": None, "waiting_by_queue": {}}
    return {**figures, **nothing, "leases": {**figures["leases"], "held": 0}}
