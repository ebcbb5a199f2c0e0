"""The process that computes for the feeders of a card: rows of tokens in, vectors out.

It knows neither Redis nor jobs. What several feeders ask for runs in the same forward passes, what
is urgent between two of them. Where it dies, each feeder knows what had begun.
"""

import os
import pickle
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np

from batchery import errors
from batchery.errors import ModelLoadError
from batchery.outcomes import Failed
from batchery_worker.device.start import check_device, find_memory, refuse_start
from batchery_worker.feeders.memory import Computed, Hello, Request, SharedRows
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.ipc.lifetime import end_process, leave_signals_to_parent, open_pipe
from batchery_worker.ipc.logs import ForwardingHandler, forward_logs
from batchery_worker.ipc.messages import (
    Ready,
    Reply,
    Setup,
    Stepped,
    Stop,
    dump_reply,
    load_message,
)
from batchery_worker.memory import Memory
from batchery_worker.plain_values import Vector
from batchery_worker.serving.loading import serve_model
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

#: How many times the tokens of a pass are taken together: texts of like lengths share a pass.
PASSES = 2

#: How often the worker is told of the model's figures, in seconds.
TELL_S = 1.0

#: How long a feeder may take to read what it needs to begin, in seconds.
HELLO_S = 5.0

#: Of SO_PEERCRED: process, user, group.
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class Feeder:
    """A feeder that is connected."""

    end: socket.socket
    #: None until it has sent it.
    memory: SharedRows | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """A request of a feeder, and its texts."""

    feeder: Feeder
    memory: SharedRows
    request: Request
    #: Tokenized, (I, L) int64 each.
    items: Sequence[Any]

    @property
    def tokens(self) -> int:
        """Tokens of all its texts."""
        return int(self.memory.ends[self.request.slot, self.request.texts])

    @property
    def about(self) -> tuple[Any, ...]:
        """What must be the same of requests that run together."""
        request = self.request
        limits = request.max_batch_size, request.max_batch_tokens
        return limits, request.keywords, request.is_urgent


class Group:
    """Requests that run together."""

    def __init__(self, asked: Sequence[Asked], task: str) -> None:
        self.asked = asked
        request = asked[0].request
        self.is_urgent, self.is_alone = request.is_urgent, request.is_alone
        self.items = [item for each in asked for item in each.items]
        self.work = Work(
            id=0,
            task=task,
            keywords=request.keywords,
            jobs=(),
            max_batch_size=request.max_batch_size,
            max_batch_tokens=request.max_batch_tokens,
            urgent=request.is_urgent,
        )

    def begin(self) -> None:
        """Notes where the feeders see it that it is on the card from now on."""
        for each in self.asked:
            each.memory.begun[each.request.slot] = 1


def take_group(waiting: deque[Asked], max_tokens: int) -> list[Asked]:
    """Takes the requests that run next: the oldest urgent one, or else the oldest, and its like.

    Args:
        waiting: In the order in which they came; at least one.
        max_tokens: Maximum tokens of what runs together, but for a single request.
    """
    first = next((each for each in waiting if each.request.is_urgent), waiting[0])
    taken, tokens = [first], first.tokens
    for each in () if first.request.is_alone else waiting:
        if each is first or each.request.is_alone or each.about != first.about:
            continue
        if tokens + each.tokens > max_tokens:
            break
        taken.append(each)
        tokens += each.tokens
    for each in taken:
        waiting.remove(each)
    return taken


class CardProcess:
    """Computes what feeders ask for, until they and the worker are gone."""

    def __init__(self, end: socket.socket, listening: socket.socket) -> None:
        """Loads nothing yet.

        Args:
            end: Of the pipe to the worker.
            listening: Where feeders connect.
        """
        self._end, self._listening = end, listening
        self._feeders: dict[int, Feeder] = {}
        self._waiting: deque[Asked] = deque()
        #: What was started ahead.
        self._next: Group | None = None
        self._is_stopping = False
        self._told_s = 0.0
        #: For how long it has computed, in seconds.
        self._computed_s = 0.0
        self._task: str
        self._hello: Hello
        self._memory: Memory
        self._served: LoadedModel

    def start(self, setup: Setup) -> Ready:
        """Loads the model.

        Raises:
            BatcheryError: It cannot; says why.
        """
        from batchery_worker.models.embedding import EmbeddingModel

        began_s = monotonic()
        self._task, settings = setup.task, setup.computes
        assert settings is not None
        check_device(setup.device)
        self._memory = find_memory(setup.device, setup.memory_fraction)
        model = EmbeddingModel(settings)
        model.give_rows()
        place = setup.device, self._memory
        self._served = serve_model(self._task, lambda: model, *place, gives_json=False)
        try:
            items = model.describe()
        except ValueError as error:
            raise ModelLoadError(f"model {self._task!r}: {error}") from error
        identity = str(model.identity()) if settings.cache else ""
        self._served.version = model.version()
        self._hello = Hello(items, identity, self._served.version)
        self._poll = select.poll()
        for each in (self._end, self._listening):
            self._poll.register(each, select.POLLIN)
        return Ready(os.getpid(), monotonic() - began_s, self._figures())

    def run(self) -> None:
        """Computes until the worker says stop, and all feeders are gone."""
        while self._feeders or not self._is_stopping:
            self._read(wait=not self._waiting and self._next is None)
            group, self._next = self._next, None
            if group is None and self._waiting:
                group = self._take()
            if group is not None:
                self._compute(group)

    # What is asked for

    def _read(self, *, wait: bool) -> None:
        """Reads what has come: of the worker, and of feeders."""
        for descriptor, _ in self._poll.poll(None if wait else 0):
            if descriptor == self._end.fileno():
                self._obey()
            elif descriptor == self._listening.fileno():
                self._accept()
            else:
                feeder = self._feeders[descriptor]
                try:
                    self._hear(feeder)
                except (EOFError, OSError):
                    self._forget(descriptor, feeder)

    def _obey(self) -> None:
        try:
            message = load_message(read_frame(self._end))
        except (EOFError, OSError):
            os._exit(0)
        self._is_stopping = self._is_stopping or isinstance(message, Stop)

    def _accept(self) -> None:
        """Takes a feeder in: a process of the same user."""
        end, _ = self._listening.accept()
        peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] != os.getuid():
            end.close()
            return
        end.settimeout(HELLO_S)
        try:
            write_frame(end, pickle.dumps(self._hello))
        except OSError:
            end.close()
            return
        end.setblocking(True)
        self._feeders[end.fileno()] = Feeder(end)
        self._poll.register(end, select.POLLIN)

    def _hear(self, feeder: Feeder) -> None:
        """Reads the memory of a feeder, or a request."""
        if (memory := feeder.memory) is None:
            feeder.memory = SharedRows.receive(self._hello, feeder.end)
            return
        request = Request.load(read_frame(feeder.end))
        ends = memory.ends[request.slot, : request.texts + 1].tolist()
        rows = memory.rows[request.slot, :, : ends[-1]].astype(np.int64)
        items = [rows[:, start:end] for start, end in pairwise(ends)]
        self._waiting.append(Asked(feeder, memory, request, items))

    def _forget(self, descriptor: int, feeder: Feeder) -> None:
        """Drops what a feeder has asked for that is gone."""
        self._poll.unregister(descriptor)
        del self._feeders[descriptor]
        feeder.end.close()
        for each in [each for each in self._waiting if each.feeder is feeder]:
            self._waiting.remove(each)

    # What is computed

    def _take(self) -> Group:
        group = Group(take_group(self._waiting, PASSES * self._served.max_tokens), self._task)
        group.begin()
        return group

    def _compute(self, group: Group) -> None:
        """Runs the passes of a group, and answers."""
        is_single = group.is_alone or group.is_urgent
        began_s, computed_s = monotonic(), self._computed_s
        outcomes, tokens, computed_tokens = self._served.compute(
            *(group.items, group.work, nullcontext),
            (lambda: None) if is_single else self._start_ahead,
            (lambda: None) if is_single else self._run_urgent,
        )
        # But for what was urgent in between.
        took_s = monotonic() - began_s - (self._computed_s - computed_s)
        self._computed_s += took_s
        place = 0
        for each in group.asked:
            count, share = each.request.texts, each.tokens / max(1, tokens)
            taken = int(computed_tokens * share), took_s * share * 1e3
            self._answer(each, outcomes[place : place + count], *taken)
            place += count
        if monotonic() - self._told_s > TELL_S:
            self._told_s = monotonic()
            self._tell(Stepped(self._figures()))

    def _start_ahead(self) -> None:
        """Starts the next group, while a device computes what was launched."""
        self._read(wait=False)
        if self._next is not None or not self._waiting:
            return
        # Nothing else may be on the card beside a text that must be alone.
        if any(each.request.is_alone or each.request.is_urgent for each in self._waiting):
            return
        self._next = self._take()
        self._served.start(self._next.items, self._next.work)

    def _run_urgent(self) -> None:
        """Runs what is urgent between two passes."""
        self._read(wait=False)
        while any(each.request.is_urgent for each in self._waiting):
            self._compute(self._take())

    def _answer(self, asked: Asked, outcomes: Sequence[Any], tokens: int, took_ms: float) -> None:
        vectors, slot = asked.memory.vectors, asked.request.slot
        failures = [
            (place, *describe_failure(outcome))
            for place, outcome in enumerate(outcomes)
            if isinstance(outcome, Failed)
        ]
        dimensions = 0
        for place, outcome in enumerate(outcomes):
            if isinstance(outcome, Vector):
                dimensions = len(outcome.row)
                vectors[slot, place, :dimensions] = outcome.row
        # A feeder that is gone is dropped where it is read from.
        with suppress(OSError):
            answer = Computed(slot, dimensions, tokens, took_ms, failures)
            write_frame(asked.feeder.end, answer.dump())

    # What the worker is told

    def _figures(self) -> dict[str, Any]:
        models = {self._task: self._served.figures()}
        return {"models": models, "memory": self._memory.figures()}

    def _tell(self, reply: Reply) -> None:
        write_frame(self._end, dump_reply(reply))


def describe_failure(failed: Failed) -> tuple[str, str]:
    """The name of an error of `batchery.errors`, and its text."""
    error = failed.exception
    name = type(error).__name__
    if getattr(errors, name, None) is type(error):
        return name, str(error)
    return "ItemFailed", f"{name}: {error}"


def main(descriptor: int, log_descriptor: int, listening: int) -> None:
    """Entry point, with the descriptors of three sockets.

    Args:
        descriptor: Of the pipe to the worker.
        log_descriptor: Of another one, for what is logged.
        listening: Where feeders connect.
    """
    leave_signals_to_parent()
    end, log = open_pipe(descriptor), open_pipe(log_descriptor)
    try:
        setup: Setup = load_message(read_frame(end))
    except EOFError:
        return
    sys.path[:] = list(setup.sys_path)
    forward_logs(ForwardingHandler(setup.name, log, lambda: None), setup.log_levels)
    card = CardProcess(end, socket.socket(fileno=listening))
    try:
        reply: Reply = card.start(setup)
    except Exception as error:  # noqa: BLE001 - the code of any model
        reply = refuse_start(error, setup.name)
    write_frame(end, dump_reply(reply))
    if isinstance(reply, Ready):
        card.run()
    end_process(has_app=False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
