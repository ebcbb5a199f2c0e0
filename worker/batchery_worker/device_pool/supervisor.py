"""The device processes of a worker: starts them, listens to them, restarts them when they die."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from batchery.errors import ModelLoadError, counted
from batchery_worker.device_pool.first_start import FirstStart
from batchery_worker.device_pool.process import DeviceProcess, State, WatchedBatch
from batchery_worker.event_loop import begin_next_turn
from batchery_worker.ipc.messages import (
    SIGN,
    Began,
    Ended,
    Fenced,
    Forget,
    Handed,
    Loaded,
    Loads,
    NotReady,
    Order,
    Ready,
    RecycleDue,
    Reload,
    Reloaded,
    Reply,
    ResultsWait,
    Running,
    Stop,
    dump_message,
)

logger = logging.getLogger("batchery.pool")

#: Number of failed starts in a row after which a device is given up.
MAX_FAILED_STARTS = 5

#: How often in a row a device may hang, without a finished batch, before the worker ends: then it
#: is hardly a job that hangs.
MAX_HANGS = 5

#: Longest time between two looks for devices that hang, in seconds.
MAX_LOOK_PAUSE_S = 1.0


#: After so much time a job that had to leave its slots has its process killed, in seconds, as has a
#: batch whose jobs were all terminated: it may hang. Most end by themselves, which costs no load.
MAX_STEP_S = 10.0


class DeviceSupervisor:
    """Device processes on an event loop; every callback runs on the loop's thread.

    They take their batches themselves, and tell of those whose time is limited.
    """

    def __init__(
        self,
        devices: Sequence[DeviceProcess],
        max_pass_s: float | None = None,
        *,
        on_end: Callable[[DeviceProcess, Sequence[WatchedBatch], bool], None],
        on_busy: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            devices: None of them has been started.
            max_pass_s: How long a device with work may give no sign, in seconds, before its
                process is killed; None for no limit.
            on_end: Called with a device whose process has ended, what is known of its batches, and
                whether it has died.
            on_busy: Called when a batch has begun or ended of which devices tell.
            on_lost: Called when every device is given up, or one hangs again and again, with the
                reason, for people.
        """
        self.devices = list(devices)
        #: Called when a device can take jobs.
        self.on_ready: Callable[[], None] = lambda: None
        self._max_pass_s = max_pass_s
        #: How long a load may take, or a device to start, in seconds; 0 while the worker starts.
        self._start_timeout_s = 0.0
        #: Devices that were given up. Their last processes must still be waited for.
        self.given_up: list[DeviceProcess] = []
        self._on_end = on_end
        self._on_busy = on_busy
        self._on_lost = on_lost
        self._hub: Any = None
        self._stopping = False
        self._refusals: dict[str, NotReady] = {}
        self._first_start = FirstStart(self.devices)
        #: Called when a device is ready, is not, or has reloaded a model; with None when its
        #: process has died.
        self.on_change: Callable[[DeviceProcess, Reply | None], None] = lambda *_: None
        #: What handles a message of a device, by its kind.
        self.handlers: dict[type[Any], Callable[[DeviceProcess, Any], None]] = {
            Ready: self._on_readiness,
            NotReady: self._on_refusal,
            Reloaded: self.change,
            Running: self._on_running,
            Ended: self._on_ended,
            Began: self._on_begin,
            Loads: self._on_load,
            Loaded: self._on_load,
            ResultsWait: self._on_wait,
            RecycleDue: self._on_recycle_due,
        }

    def change(self, device: DeviceProcess, reply: Reply | None) -> None:
        """Tells whoever minds versions of models."""
        self.on_change(device, reply)

    def run_on(self, hub: Any) -> None:
        """Goes on with the devices on a loop that is about to run."""
        self._hub = hub
        for device in self.devices:
            if device.link is None:
                hub.call_later(device.backoff_s, self._spawn, device)
            else:
                self._watch_start(device)
        self._plan_look_for_hangs()

    def begin(self, timeout_s: float) -> None:
        """Has all devices started on the next event loop; one that cannot start ends the worker.

        Args:
            timeout_s: Maximum time for each device, in seconds.
        """
        self._start_timeout_s = timeout_s
        self._first_start.begin()

    def start(self, hub: Any, timeout_s: float, interrupted: Callable[[], None]) -> None:
        """Starts all devices and waits until they are ready.

        Args:
            hub: A loop to wait on, as Celery's does not run yet.
            timeout_s: Maximum time for all devices together, in seconds.
            interrupted: Called repeatedly; raises if the worker must stop.

        Raises:
            StartError: A device cannot start; the text is its own.
        """
        deadline_s = monotonic() + timeout_s
        self._hub = hub
        self._first_start.begin()
        for device in self.devices:
            self._spawn(device)
        while any(device.state is not State.READY for device in self.devices):
            hub.run_once()
            interrupted()
            for refusal in self._refusals.values():
                raise refusal.exception()
            if why := self._first_start.find_death():
                raise ModelLoadError(why)
            if monotonic() > deadline_s:
                waiting = [each.setup for each in self.devices if each.state is not State.READY]
                names = [f"{each.name} ({', '.join(each.load) or 'no model'})" for each in waiting]
                raise ModelLoadError(
                    f"not ready after {timeout_s:g} s: {', '.join(names)};"
                    " raise the setting device_start_timeout_s if a model is that large"
                )
        self._start_timeout_s = timeout_s

    def order(
        self, device: DeviceProcess, message: Stop | Fenced | Order | Handed | Forget | Reload
    ) -> None:
        """Tells a device what to do, if it has a process."""
        if device.link is not None and not device.link.send(dump_message(message)):
            self._await_room(device)

    # What devices say of their batches

    def _on_running(self, device: DeviceProcess, reply: Running) -> None:
        batch = device.batches.get(reply.id)
        if batch is None:
            limit_s = reply.hard_limit_s
            if reply.in_slots and limit_s is not None:
                # The device minds it itself, between two steps.
                limit_s += MAX_STEP_S
            batch = WatchedBatch(reply, limit_s)
            device.hold(reply.id, batch)
            self._watch(device)
        self._on_busy()
        if reply.is_unwanted:
            self._limit_unwanted(device, batch)

    def _on_ended(self, device: DeviceProcess, reply: Ended) -> None:
        if (ended := device.release(reply.id)) is not None:
            self._give_time_back(device, ended)
        self._watch(device)
        self._on_busy()

    def _limit_unwanted(self, device: DeviceProcess, batch: WatchedBatch) -> None:
        batch.is_unwanted = True
        end_s = batch.ran_s(monotonic()) + MAX_STEP_S
        batch.hard_limit_s = min(end_s, batch.hard_limit_s or end_s)
        self._watch_limit(device, batch)

    # The clocks of batches: when each began, and how much of its time counts

    def _watch(self, device: DeviceProcess) -> None:
        """Starts the clocks of jobs in slots, and of the first batch: those behind have not begun.

        That of an urgent one runs only once the device has said so.
        """
        is_first = True
        for batch in device.batches.values():
            if batch.told.in_slots or (is_first and not batch.told.is_urgent):
                self._begin(device, batch)
            is_first = is_first and batch.told.is_urgent

    def _begin(self, device: DeviceProcess, batch: WatchedBatch) -> None:
        if batch.began_s is None:
            batch.began_s = monotonic()
        self._watch_limit(device, batch)

    def _on_begin(self, device: DeviceProcess, reply: Began) -> None:
        self._begin(device, device.batches[reply.id])

    def _on_load(self, device: DeviceProcess, reply: Loads | Loaded) -> None:
        """Keeps the time of a load out of the time of its batch, which begins after that."""
        batch, now_s = device.batches[reply.id], monotonic()
        if isinstance(reply, Loads):
            # A load has as much time as a start.
            batch.excused_until_s = now_s + self._start_timeout_s
            batch.began_s = now_s + reply.expected_s
        else:
            batch.excused_until_s, batch.began_s = 0.0, now_s
        self._watch_limit(device, batch)

    def _on_wait(self, device: DeviceProcess, reply: ResultsWait) -> None:
        """Keeps the time in which Redis may be away out of the time of a batch."""
        batch, now_s = device.batches[reply.id], monotonic()
        if not reply.is_over:
            batch.excused_until_s, batch.excused_since_s = inf, now_s
            return
        batch.excused_until_s = 0.0
        if batch.began_s is not None:
            batch.began_s += now_s - max(batch.began_s, batch.excused_since_s)
            self._watch_limit(device, batch)

    def _give_time_back(self, device: DeviceProcess, ended: WatchedBatch) -> None:
        """The time of an urgent batch does not count for the batch that it has interrupted."""
        if not ended.told.is_urgent or ended.began_s is None:
            return
        for batch in device.batches.values():
            if batch.began_s is not None and not batch.told.is_urgent:
                batch.began_s += monotonic() - max(ended.began_s, batch.began_s)

    def tell(self, device: DeviceProcess, message: Reload, on_late: Callable[[], None]) -> None:
        """Has a model loaded anew; calls `on_late` when even a start would be too late."""
        self.order(device, message)
        if self._start_timeout_s:
            self._hub.call_later(self._start_timeout_s, on_late)

    def renew(self, device: DeviceProcess) -> None:
        """Gives a device a fresh process, once it is idle and all others are ready."""
        device.recycle_due = True
        self._recycle_next()

    def recycle(self, modules: Sequence[str]) -> None:
        """Recycles the processes of all devices, one after the other, each when it is idle.

        Args:
            modules: What the fresh processes import in addition to the app.
        """
        for device in self.devices:
            device.setup = replace(device.setup, modules=modules)
            device.recycle_due = True
        self._recycle_next()

    def read(self) -> None:
        """Handles all messages that have arrived from the devices; does not wait."""
        for device in list(self.devices):
            self._guard(self._on_readable)(device)
        # A timer may have asked, behind which nothing that was planned meanwhile would go on.
        begin_next_turn(self._hub)

    def _on_recycle_due(self, device: DeviceProcess, reply: RecycleDue) -> None:
        device.recycle_due, device.jobs = True, reply.jobs
        warn_if_short(device)
        self._recycle_next()

    def _recycle_next(self) -> None:
        """Recycles the next process that is due, if all devices are ready."""
        if self._stopping or any(device.state is not State.READY for device in self.devices):
            return
        for device in self.devices:
            if device.recycle_due:
                logger.info("device %s gets a fresh process", device.name)
                device.state = State.LEAVING
                self.order(device, Stop())
                break

    def stop_restarting(self) -> None:
        """Stops restarting and recycling devices, because the worker is about to stop."""
        self._stopping = True

    def stop(self, *, kill_at_once: bool) -> None:
        """Ends all device processes; the batches that they still hold are not answered."""
        self.stop_restarting()
        for device in self.devices:
            self._ignore(device)
            device.dismiss()
        for device in (*self.devices, *self.given_up):
            device.stop(kill_at_once=kill_at_once)
            device.take_batches()

    def _spawn(self, device: DeviceProcess) -> None:
        if self._stopping or device.link is not None or device not in self.devices:
            return
        try:
            device.spawn()
        except OSError as error:
            # It counts as a death. An OSError must not get out: Celery's loop would take it for a
            # lost connection to the broker.
            logger.error("device process for %s cannot be started: %s", device.name, error)
            device.deaths += 1
            device.failed_starts += 1
            if not self._give_up(device, str(error)):
                self._hub.call_later(device.backoff_s, self._spawn, device)
            return
        self._listen(device)
        self._watch_start(device)

    def _watch_start(self, device: DeviceProcess) -> None:
        """Limits the time of a start: the driver of a card may hold it for ever."""
        if device.state is State.STARTING and self._start_timeout_s:
            left_s = device.spawned_s + self._start_timeout_s - monotonic()
            self._hub.call_later(max(0.0, left_s), self._end_late_start, device, device.pid)

    def _end_late_start(self, device: DeviceProcess, pid: int) -> None:
        # The loop may have stood still: it may be ready by now.
        self._guard(self._on_readable)(device)
        if device.state is State.STARTING and device.pid == pid:
            limit = f"device_start_timeout_s = {self._start_timeout_s:g} s"
            if self._first_start.goes_on:
                self._lose(f"device {device.name} is not ready after {limit}")
            else:
                logger.error("device %s is not ready after %s: it is killed", device.name, limit)
            device.kill("as it was not ready after device_start_timeout_s")
            # At once, as for one that hangs.
            self._on_process_death(device)

    def _listen(self, device: DeviceProcess) -> None:
        assert device.link is not None
        self._hub.add_reader(device.link.reader, self._guard(self._on_readable), device)
        if not device.link.flush():
            self._await_room(device)

    def _await_room(self, device: DeviceProcess) -> None:
        assert device.link is not None
        self._hub.add_writer(device.link.writer, self._guard(self._on_writable), device)

    def _ignore(self, device: DeviceProcess) -> None:
        if device.link is not None and self._hub is not None:
            self._hub.remove_reader(device.link.reader)
            self._hub.remove_writer(device.link.writer)

    def _guard(self, callback: Callable[[DeviceProcess], None]) -> Callable[[DeviceProcess], None]:
        def guarded(device: DeviceProcess) -> None:
            # Celery's loop takes an OSError for a lost broker, and any other error ends the worker.
            # So nothing gets out of here, and the device is restarted.
            try:
                callback(device)
            except Exception:
                logger.exception(
                    "a message of device %s cannot be handled; it is restarted", device.name
                )
                device.kill("as a message of it cannot be handled")

        return guarded

    def _watch_limit(self, device: DeviceProcess, batch: WatchedBatch) -> None:
        """Plans a look for when a batch is due, unless one is planned that comes before."""
        # One for each batch would stay with the loop for as long as the limit of the batch.
        if batch.due_s < device.look_s:
            device.look_s = due_s = batch.due_s
            self._hub.call_later(max(0.0, due_s - monotonic()), self._look, device, due_s)

    def _look(self, device: DeviceProcess, due_s: float) -> None:
        # The loop may have stood still, as while it reconnects: the answer may be here already.
        self.read()
        if device.look_s == due_s:
            device.look_s = inf
            for work_id, batch in list(device.batches.items()):
                if work_id in device.batches:
                    self._expire(device, batch)

    def _expire(self, device: DeviceProcess, batch: WatchedBatch) -> None:
        if batch.due_s > monotonic():
            self._watch_limit(device, batch)
            return
        if batch.excused_until_s:
            device.kill("as it did not load a model within device_start_timeout_s")
            # At once, as for one that hangs.
            self._on_process_death(device)
            return
        batches = device.batches.values()
        if batch.expired or any(each.interrupts(batch) for each in batches):
            # The rest of the time counts after the urgent batch: then this is planned anew.
            return
        if batch.is_unwanted:
            why = "as its jobs were revoked"
            logger.error("a batch whose jobs were revoked does not end on %s: killed", device.name)
        else:
            why, limit_s = "as its batch took too long", batch.hard_limit_s
            # Celery's words, so that who looks for them finds these, too.
            logger.error("Hard time limit (%ss) exceeded for %s", limit_s, batch)
        batch.expired = True
        device.kill(why)

    def _plan_look_for_hangs(self) -> None:
        if self._max_pass_s is not None:
            pause_s = min(MAX_LOOK_PAUSE_S, self._max_pass_s / 4)
            self._hub.call_later(pause_s, self._look_for_hangs, self._max_pass_s)

    def _look_for_hangs(self, max_pass_s: float) -> None:
        """Kills the devices that have given no sign for too long, and looks again later."""
        # The loop may have stood still itself.
        self.read()
        for device in list(self.devices):
            silent_s = device.silent_s(monotonic())
            if silent_s > max_pass_s and device.link is not None:
                logger.error(
                    "device %s hangs: no sign of it for %.1f s, and max_pass_s is %g: it is killed",
                    *(device.name, silent_s, max_pass_s),
                )
                device.hangs += 1
                device.is_hung = True
                device.kill("as it hung for longer than max_pass_s")
                # At once, as a process that a driver holds may not end: then no pipe says so.
                self._on_process_death(device)
                if device.hangs == MAX_HANGS:
                    self._on_lost(f"device {device.name} hung {MAX_HANGS} times in a row")
        # One that stands still takes no job of which it could tell.
        for device in self.devices:
            is_asked = device.heard_s < device.asked_s < inf
            if device.state is State.READY and not device.batches and not is_asked:
                device.asked_s = monotonic()
                self.order(device, Order(0, SIGN, {}))
        self._plan_look_for_hangs()

    def _on_writable(self, device: DeviceProcess) -> None:
        if device.link is not None and device.link.flush():
            self._hub.remove_writer(device.link.writer)

    def _on_readable(self, device: DeviceProcess) -> None:
        if device.link is None:
            return
        try:
            replies = device.receive()
        except EOFError:
            end = self._replace if device.state is State.LEAVING else self._on_process_death
            end(device)
            return
        for reply in replies:
            if (handle := self.handlers.get(type(reply))) is not None:
                handle(device, reply)

    def _on_readiness(self, device: DeviceProcess, reply: Ready) -> None:
        if device.state is State.LEAVING:
            logger.debug("device %s has started, and ends", device.name)
            return
        device.state = State.READY
        device.load_s, device.ready_s = reply.load_s, monotonic()
        device.failed_starts = 0
        device.is_hung = False
        self._refusals.pop(device.name, None)
        logger.info("device %s is ready, pid %d, %.1f s", device.name, reply.pid, reply.load_s)
        self.on_change(device, reply)
        self._recycle_next()
        self.on_ready()
        self._first_start.look()

    def _on_refusal(self, device: DeviceProcess, reply: NotReady) -> None:
        if device.state is State.READY:
            self._lose(reply.text)
            return
        self._refusals[device.name] = reply
        if self._first_start.goes_on and self._start_timeout_s:
            self._lose(reply.text)
        elif device.ready_s:
            # At a worker's start it is the error that ends the worker, and is logged then.
            logger.error("%s", reply.text)
        self.on_change(device, reply)

    def _kill_if_leaving(self, device: DeviceProcess, pid: int) -> None:
        if device.state is State.LEAVING and device.pid == pid:
            device.kill()

    def _replace(self, device: DeviceProcess) -> None:
        batches = device.take_batches()
        self._ignore(device)
        device.reap()
        self._spawn(device)
        self._on_end(device, batches, False)

    def _on_process_death(self, device: DeviceProcess) -> None:
        batches = [*device.batches.values()]
        self._bury(device)
        self._on_end(device, batches, True)
        self._on_busy()

    def _bury(self, device: DeviceProcess) -> None:
        self._ignore(device)
        how = f"device process for {device.name} died: {device.reap()}"
        batches = device.take_batches()
        if self._start_timeout_s and (why := self._first_start.find_death()):
            self._lose(why)
        if self._stopping and self._first_start.goes_on:
            return
        if self._give_up(device, how):
            return
        self.on_change(device, None)
        held = counted(len(batches), "batch")
        logger.error("%s, with %s; restart in %.1f s", how, held, device.backoff_s)
        self._hub.call_later(device.backoff_s, self._spawn, device)

    def _lose(self, why: str) -> None:
        self.stop_restarting()
        self._on_lost(why)

    def _give_up(self, device: DeviceProcess, how: str) -> bool:
        """Gives a device up that has failed to start too often; returns whether it has."""
        if device.failed_starts < MAX_FAILED_STARTS:
            return False
        self.devices.remove(device)
        self.given_up.append(device)
        refusal = self._refusals.pop(device.name, None)
        device.state, device.pid, device.reported = State.GIVEN_UP, 0, {}
        device.error = refusal.text if refusal else how
        logger.critical(
            "device %s is given up after %d starts: %s; mend that, and restart the worker",
            *(device.name, device.failed_starts, device.error),
        )
        self.on_change(device, None)
        # The other devices need not wait for it any longer.
        self._recycle_next()
        others = [each for each in self.devices if each.setup.task == device.setup.task]
        models = set(device.setup.models)
        if not others or models - {name for each in others for name in each.setup.models}:
            self._on_lost(f"no device is left, the last one was {device.name}")
        return True


def warn_if_short(device: DeviceProcess) -> None:
    """Warns of a process that is recycled before it has worked for as long as its start took."""
    start_s, lived_s = device.ready_s - device.spawned_s, monotonic() - device.ready_s
    if lived_s < start_s:
        logger.warning(
            "device %s gets a fresh process after %.1f s and %d jobs, but a start takes %.1f s:"
            " raise device_max_jobs or device_max_memory_bytes",
            *(device.name, lived_s, device.jobs, start_s),
        )
