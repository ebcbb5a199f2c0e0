"""The devices of a worker: started, watched, and told what to do.

One thread starts processes, and kills those that take too long. What a process says comes by a
thread of its own (`ipc/framing.py`), and Celery's threads give orders. They take turns: whoever
looks at a device, or changes it, holds `Fleet.changed`. Nothing here is asked for a job that Redis
gives to a device. Another thread beats for the leases of all devices (`beats.py`).
"""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

from celery.worker import state as worker_state

from batchery.errors import StartError, counted
from batchery.settings import Settings
from batchery.transport.redis_schema import find_own
from batchery_worker.device_pool.figures import add_up, merge, without_jobs
from batchery_worker.device_pool.process import LEAVE_TIMEOUT_S, DeviceProcess, State
from batchery_worker.device_pool.watched import WatchedBatch
from batchery_worker.ipc.framing import Pipe
from batchery_worker.ipc.messages import (
    SIGN,
    Answer,
    Fenced,
    NotReady,
    OfBatch,
    Order,
    Ready,
    RecycleDue,
    Reply,
    load_reply,
)

logger = logging.getLogger("batchery.pool")

#: How often it is looked whether a device must be started or killed, in seconds; and while there is
#: no time limit to keep.
LOOK_S, CALM_LOOK_S = 0.05, 1.0

#: A look that comes later than this, in seconds, was held up with the whole process: what devices
#: have said meanwhile must be read before it is judged.
MAX_LATE_S = 0.5

#: Number of failed starts in a row that end the worker while it starts; one may be an accident.
MAX_FIRST_STARTS = 2

#: Number of failed starts in a row after which a device is given up.
MAX_FAILED_STARTS = 5

#: How often in a row a device may hang, without a finished batch, before the worker ends: then it
#: is hardly a job that hangs.
MAX_HANGS = 5

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


class Holding:
    """What knows the jobs that devices have: leases of them, or messages of Celery's consumer."""

    @property
    def recovered(self) -> int:
        """How many messages of dead holders are back in their queues."""
        return 0

    @property
    def serving(self) -> Any:
        """The heartbeat of leases: `expiry_s`, `beat_s` and `is_silent`; None if there is none."""
        return None

    def start(self) -> None:
        """Begins to keep them."""

    def handle(self, device: DeviceProcess, reply: Reply) -> None:
        """Hears what a device says, after the fleet."""

    def leave(
        self, device: DeviceProcess, batches: Sequence[WatchedBatch], *, is_death: bool
    ) -> None:
        """Gives back what a device had whose process has ended.

        Args:
            device: The device.
            batches: Those of which it has told, and which had not ended.
            is_death: Whether what it ran may have killed it.
        """

    def stop(self) -> None:
        """Gives back what is left."""


class Fleet:
    """All devices of a worker."""

    def __init__(
        self,
        settings: Settings,
        devices: Sequence[DeviceProcess],
        make_holding: "Callable[[Fleet], Holding]",
        on_lost: Callable[[str], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: Of the worker.
            devices: None of them has been started.
            make_holding: Makes what knows the jobs of devices.
            on_lost: Called when the worker must end, with the reason for people.
        """
        self._max_pass_s = settings.max_pass_s
        #: How long a device may take to start, or a load, in seconds.
        self.start_timeout_s = settings.device_start_timeout_s
        self._on_lost = on_lost
        #: Those that were not given up, and those that were: they must still be waited for.
        self.devices = list(devices)
        self.given_up: list[DeviceProcess] = []
        #: Processes that are to take the place of a device's, and those that had it and end.
        self.beside: list[DeviceProcess] = []
        #: Told of each message of a device, and of each end.
        self.changed = threading.Condition()
        #: What the thread that watches calls next; a handler of signals may put something in, too.
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        #: Whether there was no time limit to keep when the devices were looked at.
        self._is_calm = False
        self._thread = threading.Thread(target=self._run, name="batchery-devices", daemon=True)
        #: Whether no process is started any more; whether the worker ends; whether that is over.
        self._is_ending = self._is_leaving = self._is_over = False
        #: When the first start began; None once all devices have been ready together.
        self._began_s: float | None = None
        #: Why the worker cannot start, for people, where somebody waits for that.
        self._failure = ""
        self._is_awaited = False
        #: The last of the commands that change a process, by what they are about.
        self._changes: dict[tuple[str, Any], Order] = {}
        self._numbers = itertools.count(1)
        #: Answers to the orders that somebody waits for; empty until they come.
        self._answers: dict[int, str] = {}
        #: The last figures of each device's process, and what all processes before had counted.
        self._known: dict[str, dict[str, Any]] = {}
        self._past: dict[str, Any] | None = None
        self._restarts = 0
        self._busy = BusyDevices()
        self.holding = make_holding(self)

    # Start

    def start(self, check: Callable[[], None], *, waits: bool) -> None:
        """Starts the devices; waits for their models, if there is nothing else to do.

        Args:
            check: Called while it waits; raises if the worker must stop.
            waits: Whether it waits.

        Raises:
            StartError: A device cannot start; says why.
        """
        self._is_awaited = waits
        self.holding.start()
        self._began_s = monotonic()
        models = dict.fromkeys(name for device in self.devices for name in device.setup.load)
        if models:
            # At Celery's default level, where silence looks like a fault.
            names = ", ".join(device.name for device in self.devices)
            logger.warning("loading %s on %s; their jobs wait", ", ".join(models), names)
        # Devices die with the thread that has started them.
        self._thread.start()
        while waits and self._began_s is not None:
            check()
            if self._failure:
                raise StartError(self._failure)
            with self.changed:
                self.changed.wait(LOOK_S)

    def _note_all_ready(self) -> None:
        """Ends the first start, once all devices are ready."""
        if self._began_s is None or any(each.state is not State.READY for each in self.devices):
            return
        took_s, self._began_s = monotonic() - self._began_s, None
        if any(device.setup.load for device in self.devices):
            logger.warning("models are ready after %.1f s", took_s)

    def _lose(self, why: str) -> None:
        """Ends the worker."""
        self._is_ending = True
        if self._is_awaited and self._began_s is not None:
            self._failure = self._failure or why
        else:
            self._on_lost(why)

    # The thread that starts and watches

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_over:
            due_s = monotonic() + pause_s
            calls = self._wait(pause_s)
            if monotonic() - due_s > MAX_LATE_S:
                sleep(LOOK_S)
            with self.changed:
                for call in calls:
                    self._guard("a call", call)
                for device in self._running:
                    self._guard(f"device {device.name}", partial(self._look_at, device))
                is_calm = all(each.is_calm for each in self._running)
                self._is_calm = is_calm and self._max_pass_s is None
                pause_s = CALM_LOOK_S if self._is_calm else LOOK_S

    def _wait(self, timeout_s: float) -> list[Callable[[], None]]:
        """What is to be called, once there is anything, or the time is over, in seconds."""
        calls = []
        with suppress(Empty):
            calls.append(self._calls.get(timeout=timeout_s))
            while True:
                calls.append(self._calls.get_nowait())
        return calls

    def _guard(self, what: str, function: Callable[[], None]) -> None:
        """Calls a function, whose error would end this thread, and with it all devices."""
        try:
            function()
        except Exception:
            logger.exception("%s cannot be handled", what)

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function on the thread that watches, soon and in order; from any thread."""
        self._calls.put(function)

    def _look_soon(self) -> None:
        self._calls.put(lambda: None)

    def _look_at(self, device: DeviceProcess) -> None:
        now_s = monotonic()
        if self._is_leaving and device.state in (State.STARTING, State.READY):
            device.leave()
        if device.pipe is None:
            if not self._is_ending and now_s >= device.start_at_s:
                self._spawn(device)
        elif now_s >= device.leave_by_s:
            device.kill()
        elif device.state is State.STARTING:
            self._look_at_start(device, now_s)
        elif not self._hangs(device, now_s):
            self._look_at_limits(device, now_s)

    def _spawn(self, device: DeviceProcess) -> None:
        try:
            device.spawn(partial(self._on_frame, device), partial(self._on_closed, device))
        except OSError as error:
            # It counts as a death.
            how = f"device process for {device.name} cannot be started: {error}"
            device.deaths += 1
            device.failed_starts += 1
            self._plan_restart(device, how, 0)
            self.changed.notify_all()

    def _look_at_start(self, device: DeviceProcess, now_s: float) -> None:
        """Limits the time of a start: the driver of a card may hold it for ever."""
        limit_s = self.start_timeout_s
        if now_s - device.spawned_s < limit_s:
            return
        models = ", ".join(device.setup.load) or "no model"
        why = f"not ready after {limit_s:g} s: {device.name} ({models})"
        if self._began_s is not None:
            self._lose(f"{why}; raise the setting device_start_timeout_s if a model is that large")
        else:
            logger.error("%s: it is killed", why)
        self._end_now(device, "as it was not ready after device_start_timeout_s")

    def _hangs(self, device: DeviceProcess, now_s: float) -> bool:
        """Kills a device that has given no sign for too long; returns whether it has.

        One that has no work is asked for a sign: if it stands still, it takes no job.
        """
        max_pass_s = self._max_pass_s
        if max_pass_s is None:
            return False
        silent_s = device.silent_s(now_s)
        if silent_s > max_pass_s:
            logger.error(
                "device %s hangs: no sign of it for %.1f s, and max_pass_s is %g: it is killed",
                *(device.name, silent_s, max_pass_s),
            )
            device.hangs += 1
            device.is_hung = True
            self._end_now(device, "as it hung for longer than max_pass_s")
            if device.hangs == MAX_HANGS:
                self._on_lost(f"device {device.name} hung {MAX_HANGS} times in a row")
            return True
        is_asked = device.heard_s < device.asked_s < inf
        is_quiet = not device.batches and now_s - device.heard_s > max_pass_s / 4
        if device.state is State.READY and is_quiet and not is_asked:
            device.asked_s = now_s
            device.tell(Order(0, SIGN, {}))
        return False

    def _look_at_limits(self, device: DeviceProcess, now_s: float) -> None:
        """Kills a device whose batch takes too long."""
        batch = device.batches.find_due(now_s)
        if batch is None:
            return
        if batch.excused_until_s:
            self._end_now(device, "as it did not load a model within device_start_timeout_s")
            return
        batch.expired = True
        if batch.is_unwanted:
            logger.error("a batch whose jobs were revoked does not end on %s: killed", device.name)
            device.kill("as its jobs were revoked")
        else:
            # Celery's words, so that who looks for them finds these, too.
            logger.error("Hard time limit (%ss) exceeded for %s", batch.hard_limit_s, batch)
            device.kill("as its batch took too long")

    def _end_now(self, device: DeviceProcess, why: str) -> None:
        """Kills a process and takes it for dead: one that a driver holds may not end."""
        device.kill(why)
        self._on_end(device)

    # What processes say, each on the thread of its pipe

    def _on_frame(self, device: DeviceProcess, pipe: Pipe, frame: bytes) -> None:
        with self.changed:
            if device.pipe is pipe:
                try:
                    self._handle(device, load_reply(frame))
                except Exception:
                    logger.exception(
                        "a message of device %s cannot be handled; it is restarted", device.name
                    )
                    device.kill("as a message of it cannot be handled")
                if self._is_calm and not device.is_calm:
                    self._look_soon()
            self.changed.notify_all()

    def _handle(self, device: DeviceProcess, reply: Reply) -> None:
        device.note(reply)
        match reply:
            case Ready():
                self._on_ready(device, reply)
            case NotReady():
                self._on_refusal(device, reply)
            case RecycleDue():
                device.recycle_due = True
                warn_if_short(device, reply.jobs)
                self._recycle_next()
            case Answer():
                if reply.number in self._answers:
                    self._answers[reply.number] = reply.value
            case _ if isinstance(reply, OfBatch):
                device.note_batch(reply, self.start_timeout_s)
                self._note_busy()
        self.holding.handle(device, reply)

    def _on_ready(self, device: DeviceProcess, reply: Ready) -> None:
        for order in self._changes.values():
            device.tell(order)
        if device.state is State.LEAVING:
            logger.debug("device %s has started, and ends", device.name)
            return
        device.state = State.READY
        device.load_s, device.ready_s = reply.load_s, monotonic()
        device.failed_starts = 0
        device.is_hung = False
        device.error = ""
        logger.info("device %s is ready, pid %d, %.1f s", device.name, reply.pid, reply.load_s)
        self._recycle_next()
        self._note_all_ready()

    def _on_refusal(self, device: DeviceProcess, reply: NotReady) -> None:
        device.error = reply.text
        if device in self.beside:
            return
        if device.state is State.READY or self._began_s is not None:
            # At a worker's start it is the error that ends the worker.
            self._lose(reply.text)
        else:
            logger.error("%s", reply.text)

    def _note_busy(self) -> None:
        """Lets a soft shutdown of Celery's wait for devices as for its own jobs."""
        if any(device.batches for device in self._running):
            worker_state.active_requests.add(self._busy)
        else:
            worker_state.active_requests.discard(self._busy)

    def _on_closed(self, device: DeviceProcess, pipe: Pipe) -> None:
        if device.pipe is pipe:
            device.await_end()
        with self.changed:
            if device.pipe is pipe:
                self._on_end(device)

    # Ends

    def _on_end(self, device: DeviceProcess) -> None:
        """Takes a process for gone: gives back what it had, and plans the next one."""
        is_death = device.state is not State.LEAVING
        how, batches = device.bury()
        if device in self.devices:
            self._restarts += is_death
            self._end_figures(device.name)
        if is_death:
            died = f"device process for {device.name} died: {how}"
            self._plan_restart(device, died, len(batches))
        elif device in self.beside:
            self.beside.remove(device)
        self.holding.leave(device, batches, is_death=is_death and not self._is_leaving)
        self._note_busy()
        self.changed.notify_all()
        self._look_soon()

    def _end_figures(self, name: str) -> None:
        """Keeps what a process had counted that serves a device no longer."""
        if known := self._known.pop(name, None):
            ended = without_jobs(known)
            self._past = add_up([ended, self._past] if self._past else [ended])

    def _plan_restart(self, device: DeviceProcess, how: str, held: int) -> None:
        if device in self.beside:
            self.beside.remove(device)
            device.error = device.error or how
            return
        is_first = self._began_s is not None
        if is_first and not device.ready_s and device.failed_starts >= MAX_FIRST_STARTS:
            self._lose(
                f"device process for {device.name} died while it started,"
                f" {MAX_FIRST_STARTS} times; its error output is above"
            )
        if is_first and self._is_ending:
            return
        if device.failed_starts >= MAX_FAILED_STARTS:
            self._give_up(device, how)
            return
        device.start_at_s = monotonic() + device.backoff_s
        in_s = device.backoff_s
        logger.error("%s, with %s; restart in %.1f s", how, counted(held, "batch"), in_s)

    def _give_up(self, device: DeviceProcess, how: str) -> None:
        """Gives a device up that has failed to start too often."""
        self.devices.remove(device)
        self.given_up.append(device)
        device.state, device.pid, device.reported = State.GIVEN_UP, 0, {}
        device.error = device.error or how
        logger.critical(
            "device %s is given up after %d starts: %s; mend that, and restart the worker",
            *(device.name, device.failed_starts, device.error),
        )
        # The other devices need not wait for it any longer.
        self._recycle_next()
        others = [each for each in self._takers if each.setup.task == device.setup.task]
        if device.setup.computes is not None:
            others = []
        models = set(device.setup.models)
        if not others or models - {name for each in others for name in each.setup.models}:
            self._on_lost(f"no device is left, the last one was {device.name}")
        self.changed.notify_all()

    # Fresh processes by order

    def recycle(self, modules: Sequence[str]) -> None:
        """Gives every device a fresh process, which imports these modules; no job is lost."""
        with self.changed:
            for device in self._takers:
                device.setup = replace(device.setup, modules=modules)
                device.recycle_due = True
            self._recycle_next()

    def _recycle_next(self) -> None:
        """Recycles the next process that is due, if all devices are ready."""
        if self._is_ending or any(each.state is not State.READY for each in self.devices):
            return
        if (device := next((each for each in self.devices if each.recycle_due), None)) is not None:
            logger.info("device %s gets a fresh process", device.name)
            device.start_at_s = 0.0
            device.leave()
            self._look_soon()

    # Another process in the place of one

    def start_beside(self, fresh: DeviceProcess) -> None:
        """Starts a process that is to take a device's place; it is not `beside` if that fails."""
        self.beside.append(fresh)
        self._look_soon()

    def replace(self, old: DeviceProcess, fresh: DeviceProcess) -> None:
        """Puts a process that is ready in a device's place; the old one is `beside` to its end."""
        self._end_figures(old.name)
        self.beside.remove(fresh)
        self.devices = [fresh if each is old else each for each in self.devices]
        if old.pipe is not None:
            self.beside.append(old)
            old.leave()

    @property
    def _takers(self) -> list[DeviceProcess]:
        """The devices that take jobs; a card's process only computes for its feeders."""
        return [each for each in self.devices if each.setup.computes is None]

    @property
    def _running(self) -> list[DeviceProcess]:
        """All devices that have a process, or will."""
        return [*self.devices, *self.beside]

    # Orders

    def fence(self, device: DeviceProcess, holder: str) -> None:
        """Tells a device that others have the leases of a holder; from any thread."""
        with self.changed:
            device.tell(Fenced(holder))

    def change(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """As `ask`; if the command lasts, processes that start later run it, too."""
        if (about := LASTING.get(name)) is not None:
            with self.changed:
                self._changes[about, options.get("task_name")] = Order(0, name, options)
        return self.ask(name, options)

    def ask(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Has a command run by all devices; their answers, by the names of those that gave one."""
        with self.changed:
            ready = [each for each in self._takers if each.state is State.READY]
            numbers = {next(self._numbers): each for each in ready}
            self._answers |= dict.fromkeys(numbers, "")
            for number, device in numbers.items():
                device.tell(Order(number, name, options))
            self.changed.wait_for(lambda: all(map(self._answers.get, numbers)), ANSWER_S)
            found = {device.name: self._answers.pop(each) for each, device in numbers.items()}
        return {name: json.loads(value) for name, value in found.items() if value}

    def take_from(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Has all devices take from these queues, each with the tasks whose jobs come by it."""
        with self.changed:
            for device in self._running:
                device.setup = device.setup.with_queues(sizes)
        self.ask("batchery_queues", {"sizes": sizes})

    @property
    def queues(self) -> Sequence[str]:
        """Names of the queues that devices take from."""
        return sorted({find_own(name) for each in self.devices for name in each.setup.jobs.sizes})

    def figures(self) -> dict[str, Any]:
        """What `celery inspect batchery` shows, and how many jobs of each task there were."""
        self._known.update(self.ask("batchery", {}))
        devices = [*self.devices, *self.given_up]
        found = [self._known[each.name] for each in devices if each.name in self._known]
        return merge(found, devices, self._past, self._restarts, self.holding.recovered)

    # The end

    def stop_taking(self) -> None:
        """Has all devices take nothing more; also from a handler of signals, so it only notes."""
        self._is_leaving = self._is_ending = True
        self._look_soon()

    def stop(self, is_cold: Callable[[], bool]) -> None:
        """Waits until the devices have finished what they have begun, and ends them."""
        self.stop_taking()
        while not is_cold() and any(device.pipe for device in self._running):
            sleep(0.02)
        self.terminate()

    def terminate(self) -> None:
        """Kills the devices; what they hold goes back to the queues."""
        self.stop_taking()
        self._is_over = True
        self._look_soon()
        if self._thread.is_alive():
            self._thread.join(LEAVE_TIMEOUT_S)
        with self.changed:
            for device in (*self._running, *self.given_up):
                device.stop()
        self.holding.stop()


def warn_if_short(device: DeviceProcess, jobs: int) -> None:
    """Warns of a process that is recycled before it has worked for as long as its start took."""
    start_s, lived_s = device.ready_s - device.spawned_s, monotonic() - device.ready_s
    if lived_s < start_s:
        logger.warning(
            "device %s gets a fresh process after %.1f s and %d jobs, but a start takes %.1f s:"
            " raise device_max_jobs or device_max_memory_bytes",
            *(device.name, lived_s, jobs, start_s),
        )
