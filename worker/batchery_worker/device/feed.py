"""The batches of a device, of what it takes from Redis or was handed over.

One turn takes messages, reads them, admits their jobs, and forms the next batch. The main thread
drives it while it has nothing else to do. While that computes something long, the feeder thread
drives it: the next batch is taken and prepared meanwhile, and what is urgent.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic, time
from typing import Any

import redis
from celery import Celery, signals
from celery.app import trace
from celery.worker import state as worker_state
from kombu.serialization import prepare_accept_content

from batchery.errors import InvalidItem
from batchery.installation import get_installation
from batchery.shards import list_shards, shard_of
from batchery.task import BatchTask
from batchery.transport.codec import read_json, reads_kombus_json
from batchery.transport.lease_store import RETURN_AHEAD_S, LeaseStore
from batchery.transport.redis_schema import BATCHES, ORDINARY, find_own
from batchery_worker.batch import DeviceBatch
from batchery_worker.device.fetcher import Part
from batchery_worker.device.handed_source import HandedSource
from batchery_worker.device.plain_call import PlainReader
from batchery_worker.device.redis_source import RedisSource
from batchery_worker.device.sharded_source import ShardedSource
from batchery_worker.device.stock_consumer import CallPool, EtaTimer, StockConsumer
from batchery_worker.dispatch.dispatcher import Dispatcher
from batchery_worker.in_flight import TaskCall
from batchery_worker.ipc.messages import Fate, JobsSetup, Joined, Reply, Setup
from batchery_worker.work import Cancel

logger = logging.getLogger("batchery.device")

#: How often the feeder thread looks whether the main thread drives nothing for long, in seconds.
LOOK_S = 1.0

#: How long jobs are held before they may go to another device, in seconds.
HELD_S = 0.1

#: Maximum number of events in one message. They are sent once a turn; by default Celery also sends
#: them after every 24, which is eight messages for a batch of 64 jobs.
MAX_EVENTS = 1000

#: How often other workers may be told of what this device holds, in seconds; and how often it looks
#: for jobs whose time has come.
DESCRIBE_S = 1.0

#: For how long a device holds a job until its time, in seconds; others wait in Redis. They are put
#: back with so much time left that a device that looks as seldom as this holds them in time.
MAX_EARLY_S = RETURN_AHEAD_S + DESCRIBE_S


class Turns:
    """What is to be done in the next turn of the feed, or at a time."""

    def __init__(self, wake: Callable[[], None], postpone: Callable[[Any, float], bool]) -> None:
        self.timer: Any = EtaTimer(postpone, LOOK_S)
        self._due = iter(self.timer)
        self._soon: deque[Callable[[], None]] = deque()
        self._wake = wake

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls a function in the next turn; from any thread."""
        self._soon.append(function)
        self._wake()

    def call_later(self, delay_s: float, function: Callable[..., None], *args: Any) -> Any:
        """Calls a function at a time; returns an entry that can be cancelled."""
        entry = self.timer.call_after(delay_s, function, args)
        self._wake()
        return entry

    def run(self) -> float | None:
        """Calls what is due; in how many seconds the next one is, None for never."""
        for _ in range(len(self._soon)):
            _guarded(self._soon.popleft())
        while True:
            delay_s, entry = next(self._due)
            if entry is None:
                return 0.0 if self._soon else delay_s
            _guarded(entry)

    @property
    def has_work(self) -> bool:
        """Whether something is to be done in the next turn."""
        return bool(self._soon)


def _guarded(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        logger.exception("a turn of the device has failed")


class Workload:
    """What the fetch must know of the jobs that are here; see `fetcher`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        sizes: Mapping[str, Mapping[str, int]],
        classes: Mapping[int, str],
    ) -> None:
        """Knows how many jobs of each task are a batch, by queue, and classes by their levels."""
        self._dispatcher = dispatcher
        self._sizes = sizes
        self._classes = classes
        self._tasks = {queue: frozenset(each) for queue, each in sizes.items()}

    def count_free(self) -> int:
        """How many jobs could begin at once."""
        return self._dispatcher.count_free()

    def find_jobs(self, queue: str) -> frozenset[str]:
        """The tasks whose jobs come by a queue."""
        return self._tasks[queue]

    def limit_for(self, queue: str, level: int) -> int:
        """How many more jobs of a queue and of the class that begins at a priority to take."""
        return self._dispatcher.count_wanted(self._sizes[queue], self._classes[level])

    def is_short_of(self, part: Part) -> bool:
        """Whether jobs of a part are wanted, as too few are here for a batch of them alone."""
        sizes = self._sizes.get(part.queue, {})
        return self._dispatcher.is_short_of(sizes, self._classes[part.level])


class Feed:
    """Takes jobs for one device, forms their batches, and settles them."""

    def __init__(
        self,
        app: Celery,
        setup: Setup,
        prepare: Callable[[DeviceBatch | Cancel], Any],
        answer_sent: Callable[[], bool],
        tell: Callable[[Reply], None],
        figures: Callable[[], dict[str, Any]],
        *,
        resumes: bool,
    ) -> None:
        """Does not connect yet: the broker may be away.

        Args:
            app: The device's.
            setup: What the device was told.
            prepare: Makes what runs of a batch, or of an order for one; for whoever drives.
            answer_sent: Answers the batch whose results were sent, before whoever drives waits;
                whether there was one.
            tell: Sends a message to the worker.
            figures: Finds those of the device's models and memory.
            resumes: As of `HeldBatches`.
        """
        jobs = setup.jobs
        if setup.app:
            # As in Celery's worker, before tracers are made. A test's process is left alone.
            trace.setup_worker_optimizations(app, jobs.hostname)
        self._app = app
        self._setup = setup
        self._prepare = prepare
        self._answer_sent = answer_sent
        self._tell = tell
        self._find_figures = figures
        #: Guards all that is known of jobs; held for moments.
        self.lock = threading.RLock()
        #: Held by the thread that takes.
        self._driver = threading.Lock()
        self._wants_driver = False
        self._go = threading.Event()
        self._busy_since_s: float | None = None
        #: Whether a batch has left or ended since Redis was asked.
        self._is_behind = False
        #: Whether something has happened since the next batch was asked for; and when to ask for it
        #: although nothing has, on the clock of `time.monotonic`.
        self._has_news, self._due_s = False, inf
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_stopping = False
        #: Set when the main thread has seen that nothing more comes.
        self.closed = threading.Event()
        self._settings = settings = get_installation(app).settings
        self.turns = Turns(self._wake, self._postpone)
        sizes = (size for each in jobs.sizes.values() for size in each.values())
        self.dispatcher = Dispatcher(
            *(app, settings, setup, max(sizes, default=settings.max_batch_size)),
            *(self.turns.call_soon, tell),
            resumes=resumes,
        )
        # The worker cannot look into Redis to see what a dead device had begun.
        self.dispatcher.is_watched |= jobs.is_handed
        self.eventer = self._make_eventer(jobs)
        self._accept = prepare_accept_content(app.conf.accept_content)

        def is_here(task: BatchTask) -> bool:
            # What no device of the worker serves is refused by any, and so is not forwarded.
            name = task.name
            is_its = name == setup.task if task.slots else name not in setup.elsewhere
            return is_its or jobs.is_handed

        pool = CallPool(self.dispatcher.admit, self._cancel, jobs.limits)
        self.consumer = StockConsumer(
            *(app, jobs.hostname, pool, self.turns.timer, self.eventer),
            self._find_list,
            is_here,
        )
        self.source: Any
        if jobs.is_handed:
            self.source = HandedSource(tell, self._deliver)
        else:
            levels = sorted(each.level for each in settings.classes.values())

            def make_source(names: Sequence[str], *options: Any) -> RedisSource:
                return RedisSource(
                    *(app, names, levels, jobs.hostname),
                    *(self._deliver, self._find_running, *options),
                )

            names = list(jobs.sizes)
            if len(list_shards(app)) > 1:
                self.source = ShardedSource(app, make_source, names)
            else:
                self.source = make_source(names)
            self.source.listeners.on_joined = self._on_joined
            self.source.listeners.on_left = self._on_left
        self._serve(jobs)
        worker_state.revoked.update(jobs.revoked)
        self._describe()
        admission = self.dispatcher.admission
        plain = {
            name: (
                admission.options(task).limits,
                pool.choose_limits(task, None, None),
                bool(task.send_events),
            )
            for name, task in app.tasks.items()
            if isinstance(task, BatchTask)
            and reads_kombus_json(self._accept)
            and is_here(task)
            and task.acks_late
            and not task.rate_limit
            and not admission.options(task).needs_context
        }
        self._reader = PlainReader(plain, admission, self._make_call)
        self.turns.call_later(HELD_S, self._give)

    def _serve(self, jobs: JobsSetup) -> None:
        self._jobs = jobs
        classes = {each.level: name for name, each in self._settings.classes.items()}
        self._workload = Workload(self.dispatcher, jobs.sizes, classes)
        self.source.workload = self._workload

    def take_from(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Takes from other queues from now on."""
        self._serve(self._setup.with_queues(sizes).jobs)
        self.source.select_queues([*self._jobs.sizes])
        self._tell_news()

    def _describe(self) -> None:
        """Tells other workers, through Redis, what this device takes, and how much it holds."""
        self.turns.call_later(DESCRIBE_S, self._describe)
        self.source.return_due()
        self.source.describe()

    def _make_eventer(self, jobs: JobsSetup) -> Any:
        self._flushes = False
        events: Any = self._app.events
        eventer = events.Dispatcher(
            self._app.connection_for_write(),
            hostname=jobs.hostname,
            # As Celery's own: remote control adds the other group.
            groups=["worker", "task"] if jobs.sends_events else ["worker"],
            buffer_group=["task"],
            on_send_buffered=self._flush_events_soon,
        )
        eventer.buffer_limit = MAX_EVENTS
        return eventer

    def _flush_events_soon(self) -> None:
        if not self._flushes:
            self._flushes = True
            self.turns.call_soon(self._flush_events)

    def _flush_events(self) -> None:
        self._flushes = False
        self.eventer.flush()

    # What the device asks

    @property
    def is_empty(self) -> bool:
        """Whether no other batch is prepared."""
        return self._ready.empty()

    def take(self) -> Any:
        """Takes the next batch; waits for it.

        Raises:
            EOFError: The device must end, and nothing is left here.
        """
        self._busy_since_s = None
        self._go.clear()
        if not self._driver.acquire(blocking=False):
            self._wants_driver = True
            self._wake()
            self._driver.acquire()
            self._wants_driver = False
        try:
            while True:
                if not self._ready.empty():
                    return self._ready.get()
                if (batch := self._drive()) is not None:
                    return self._prepare(batch)
        except EOFError:
            self.closed.set()
            raise
        finally:
            self._busy_since_s = monotonic()
            self._driver.release()

    def take_arrived(self) -> Any:
        """Takes the next batch, if it is there.

        Raises:
            queue.Empty: It is not.
        """
        if self._ready.empty() and self._is_due and self._driver.acquire(blocking=False):
            try:
                with self.lock:
                    self.turns.run()
                    batch = None if self._asks_first else self._form()
                if batch is not None:
                    return self._prepare(batch)
            finally:
                self._driver.release()
        return self._ready.get_nowait()

    def read_ahead(self) -> None:
        """From now on the other thread takes, until this one waits for a batch."""
        self._go.set()

    def run(self) -> None:
        """The feeder thread's work."""
        while not self.closed.is_set():
            self._go.wait(LOOK_S)
            since_s = self._busy_since_s
            is_late = since_s is not None and monotonic() - since_s > LOOK_S
            if not (self._go.is_set() or is_late):
                continue
            with self._driver:
                while not self._wants_driver and self._busy_since_s is not None:
                    try:
                        batch = self._drive()
                    except EOFError:
                        self._go.clear()
                        break
                    if batch is not None:
                        self._ready.put(self._prepare(batch))

    # Driving

    def _drive(self) -> DeviceBatch | Cancel | None:
        """One turn: what is due is done, messages are taken; what is to be run next, if anything.

        Raises:
            EOFError: The device must end, and nothing is left here.
        """
        source = self.source
        with self.lock:
            next_s = self.turns.run()
            asks_first = self._asks_first
            if not asks_first and (batch := self._form()) is not None:
                return batch
            if self.is_stopping and self.dispatcher.is_done:
                raise EOFError
        if self._answer_sent():
            return None
        is_there = not self.is_stopping and source.connect()
        with self.lock:
            is_asked = is_there and not self.is_stopping and source.ask()
            # Of a long batch nothing is wanted before it is near its end.
            self._is_behind = self._is_behind and not (is_asked or asks_first)
        if is_asked:
            if answer := source.read():
                with self.lock:
                    self._take_in(answer)
                asks_first = True
            if source.may_have_more:
                asks_first = True
        if not asks_first:
            source.flush()
            due_s = self._due_s - monotonic()
            source.wait(due_s if next_s is None else min(due_s, next_s), lambda: self._is_due)
        return None

    def _form(self) -> DeviceBatch | Cancel | None:
        """The next batch, or an order for one; None if the device gets nothing now."""
        self._has_news = False
        batch = self.dispatcher.next()
        self._due_s = self.dispatcher.find_due_s() if batch is None else 0.0
        self._is_behind = self._is_behind or batch is not None
        if batch is not None and self.dispatcher.is_low and not self.is_stopping:
            self.source.ask_ahead()
        return batch

    @property
    def _asks_first(self) -> bool:
        """Whether what waits may grow by what is in Redis, before it is the next batch.

        Nothing is taken while a short batch runs. What was left over from the fetch before it would
        go alone, and what has come meanwhile would wait behind. And a class of which more waits in
        Redis must not be out of the batch because none is left here: it would lose its share.
        """
        if not self._is_behind or self.is_stopping or not self.source.is_connected:
            return False
        is_short_of = self._workload.is_short_of
        return self.dispatcher.holds_part or any(map(is_short_of, self.source.rich_parts))

    @property
    def _is_due(self) -> bool:
        """Whether there is something to do without waiting."""
        is_told = self._has_news or self._wants_driver or self.turns.has_work
        return is_told or monotonic() >= self._due_s

    def _wake(self) -> None:
        source = getattr(self, "source", None)
        if source is not None:
            source.wake()

    def _tell_news(self) -> None:
        """Has the next batch asked for; from any thread."""
        self._has_news = True
        self._wake()

    # Jobs

    def _on_joined(self, holder: str, place: int) -> None:
        """Forgets what waits whose leases are lost: this device has another id at one place now."""
        with self.lock:
            self._drop_waiting(lost_only=True)
        # Commands look there for workers as soon as these are ready.
        self.turns.call_soon(self.source.describe)
        self._tell(Joined(holder, place))

    def _drop_waiting(self, *, lost_only: bool = False) -> list[Any]:
        """Drops what has not begun, or of that what is lost; returns Celery's requests of it."""
        self.dispatcher.forget_waiting(lost_only=lost_only)
        state: Any = worker_state
        known = {*state.reserved_requests, *state.scheduled_requests} - {*state.active_requests}
        requests = [
            each
            for each in known
            if self._is_own(each) and not (lost_only and each.lease and each.lease.is_held)
        ]
        for request in requests:
            state.task_ready(request)
        return requests

    def forget_waiting(self) -> None:
        """Gives back what was handed over, and has not begun."""
        with self.lock:
            self.source.forget_waiting()
            for request in self._drop_waiting():
                # Those that wait for their time are with the timer.
                request._already_revoked = True
                self.source.settle(request.message.delivery_tag, Fate.FORGOTTEN)

    def abandon(self) -> None:
        """Drops all jobs, as nobody waits for this device any more, which may go on for ever."""
        self.stop()
        state: Any = worker_state
        with self.lock:
            known = {*state.reserved_requests, *state.scheduled_requests, *state.active_requests}
            for request in known:
                if self._is_own(request):
                    request._already_cancelled = True
                    state.task_ready(request)

    def _is_own(self, request: Any) -> bool:
        """Whether a request is this device's: others may be in the same process."""
        if not self._jobs.is_handed:
            return True
        channel = getattr(getattr(request, "message", None), "channel", None)
        return getattr(channel, "source", None) is self.source

    def _on_left(self, store: LeaseStore) -> None:
        with self.lock:
            store.lost(set(store.leases) - self._find_running(store))

    def _cancel(self, job_id: str) -> None:
        self.dispatcher.cancel(job_id)
        self._tell_news()

    def _deliver(self, payload: Any) -> None:
        channel = self.source.open_channel(self._accept)
        try:
            message = channel.message_to_python(payload)
        except Exception as error:  # noqa: BLE001 - a message may be malformed in any way
            self.source.dead_letter(payload["properties"]["delivery_tag"], error)
        else:
            if message.errors:
                # Its body cannot be decompressed; kombu's consumer does the same.
                message._reraise_error(self.consumer.on_decode_error)
            else:
                self.consumer.handle(message)

    def _make_call(self, store: LeaseStore, payload: Any) -> TaskCall:
        """Makes a call of a plain message by Celery's own request."""
        message = self.source.open_channel(self._accept, store).message_to_python(payload)
        return TaskCall(self.consumer.make_request(message))

    def _take_in(self, answer: Any) -> None:
        """Takes messages in, in their order."""
        store = self.source.lease_store
        if store is None or answer[0] or not self._may_be_plain:
            self.source.take_in(answer)
            return
        first, keys = int(answer[1]), self.source.keys
        read, take = self._reader.read, store.leases.take
        send = self.eventer.send if "task" in self.eventer.groups else None
        now_s, unix_s = monotonic(), time()
        for at in range(len(answer) // 2 - 1):
            token, key, raw = str(first + at), keys[answer[2 + 2 * at]], answer[3 + 2 * at]
            try:
                job = read(store, token, raw, now_s, unix_s, send)
            except Exception:  # noqa: BLE001 - whatever it is, Celery's own code will say so
                job = None
            if job is None:
                self.source.hand_over((token, key, raw))
            else:
                take(token, key)
                job.payload.tell_received()
                self.dispatcher.take_in(job)

    def _postpone(self, request: Any, due_s: float) -> bool:
        """Has a job wait for its time in Redis, if that is not soon; whether it does."""
        lease = getattr(request, "lease", None)
        if due_s - monotonic() < MAX_EARLY_S or lease is None:
            return False
        known = lease.store.leases.get(lease.token)
        if known is None or known.suspect is not None:
            return False
        lease.store.postpone(lease.token, self._find_queue(known.key), due_s)
        request.acknowledged = True
        return True

    def list_later(self) -> list[Any]:
        """Celery's requests of the next jobs that wait in Redis for their time."""
        requests = []
        for store in self.source.stores:
            channel = self.source.open_channel(self._accept, store)
            for raw in store.list_later(self.source.names):
                # Celery's own code says what is wrong with one when its time comes.
                with suppress(Exception):
                    message = channel.message_to_python(read_json(raw))
                    requests.append(self.consumer.make_request(message))
        return requests

    def materialise(self) -> None:
        """Makes Celery's requests of all jobs that are here, so that Celery's commands see them."""
        for call in self.dispatcher.list_calls():
            _ = call.request

    def _find_list(self, task: Any, key: str) -> str:
        """Where jobs that this device cannot run belong, for the list that one came by.

        Raises:
            InvalidItem: Not where this list is: a message is not moved from server to server.
        """
        queue = self._find_queue(key)
        shard = shard_of(self._app, queue)
        is_batch = isinstance(task, BatchTask)
        if shard.is_apart and not (is_batch and shard == shard_of(self._app, task.name)):
            raise InvalidItem(
                f"task {task.name!r} has no jobs in queue {queue!r}: send them to its own"
            )
        if isinstance(task, BatchTask):
            # It has a list of its own, whatever its jobs came by.
            name = task.name + BATCHES
        else:
            # A list of tenants may be beside a queue that Celery's consumer has.
            name = queue + ORDINARY if queue in self.source.names else find_own(queue)
        found: str = self.source.find_like(key, name)
        return found

    def _find_queue(self, key: str) -> str:
        name: str = self.source.find_queue(key)
        return name

    def _find_running(self, store: LeaseStore) -> set[str]:
        """Tokens of all leases of a store whose jobs have begun, and are not settled."""
        with self.lock:
            leases = [call.lease for call in self.dispatcher.list_begun()]
        return {each.token for each in leases if each is not None and each.store is store}

    # What the device says of its batches

    def note_begun(self, batch: DeviceBatch) -> None:
        """Notes that a batch begins now."""
        batch.began_s = monotonic()
        if batch.work.urgent:
            # The next urgent one can be prepared meanwhile.
            self._tell_news()

    def free_slot(self, batch_id: int) -> None:
        """Notes that an item of a batch has left its slot, and others of its job go on."""
        with self.lock:
            self.dispatcher.held.free_slot(batch_id)
        self._tell_news()

    def end(self, batch: DeviceBatch) -> None:
        """Notes that a batch was computed: the device is free for another one."""
        with self.lock:
            self.dispatcher.end(batch)
            self._is_behind = True
        self._tell_news()

    def settle(self, batch: DeviceBatch) -> None:
        """Settles the jobs of a batch that is answered."""
        with self.lock:
            self.dispatcher.settle(batch)
        self._tell_news()

    def find_wanted(self) -> frozenset[str]:
        """The tasks whose jobs wait here."""
        with self.lock:
            return self.dispatcher.find_wanted()

    def _give(self) -> None:
        """Gives jobs back that were held for long, if other devices wait for work."""
        self.turns.call_later(HELD_S, self._give)
        before_s = monotonic() - HELD_S
        oldest_s = self.dispatcher.find_oldest_s()
        if oldest_s is None or oldest_s > before_s or self.is_stopping:
            return
        if not self.source.is_connected:
            return
        try:
            for store in self.source.stores:
                if store.others_wait():
                    self.dispatcher.offer(before_s, partial(self._give_to_waiting, store))
        except (redis.RedisError, OSError) as error:
            # Nobody knows what went back.
            self.source.prepare_anew()
            logger.debug("nothing can be given back: %r", error)

    def _give_to_waiting(self, store: LeaseStore, calls: Any) -> Any:
        by_token = {
            call.lease.token: call
            for call in calls
            if call.lease is not None and store.holds(call.lease.token)
        }
        jobs = []
        for token in sorted(by_token, key=int):
            lease = store.leases.get(token)
            if lease is not None and lease.deaths is None:
                name = self._find_queue(lease.key)
                jobs.append((token, store.keys.queue(name)))
        given = [by_token[token] for token in store.give_to_waiting(jobs)] if jobs else []
        for call in given:
            if not call.is_plain:
                call.request.acknowledged = True
                worker_state.task_ready(call.request)
        if given:
            logger.info("%d jobs go back to their queue: another device waits", len(given))
        return given

    def figures(self) -> dict[str, Any]:
        """What the worker is told of this device."""
        found = self.dispatcher.figures()
        found["devices"][self._setup.name] |= self._find_figures()
        return {
            **found,
            "leases": self.source.figures(),
            # A thread of the worker's process counts with it.
            "total": worker_state.total_count if self._setup.app else {},
        }

    @property
    def _may_be_plain(self) -> bool:
        """Whether nobody wants Celery's request of each job: no log, and no receivers."""
        return not (signals.task_received.receivers or trace.logger.isEnabledFor(logging.INFO))

    def note_items(self, batch: DeviceBatch, places: Sequence[int]) -> None:
        """Notes of a suspect with which items runs have ended, and which one begins, the last."""
        handle = batch.formed.jobs[0].payload.lease
        if handle is not None:
            with self.lock:
                handle.store.note_items(handle.token, places)

    # The end

    def give_back(self, batch: DeviceBatch) -> None:
        """Gives the jobs of a batch back that has not begun, before the process ends."""
        with self.lock:
            leases = [job.payload.lease for job in batch.formed.jobs]
            tokens = [each.token for each in leases if each is not None]
            if batch.store is not None:
                batch.store.requeue(tokens, first=True)

    def stop(self) -> None:
        """Takes nothing more; what waits goes back, what is on the device is finished."""
        with self.lock:
            self.is_stopping = True
            self.dispatcher.stop()
        self._tell_news()

    def close(self) -> None:
        """Gives back what is left, and leaves Redis."""
        with self.lock:
            self.dispatcher.finish()
            self.turns.run()
        self.eventer.close()
        self.source.close()
