"""Runs the batches of a feeder: the process of the card computes them."""

import logging
import os
import pickle
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NoReturn

import numpy as np
from celery.exceptions import SoftTimeLimitExceeded

from batchery import errors
from batchery.execution.batch import prepare
from batchery.outcomes import Failed
from batchery_worker.batch import DeviceBatch
from batchery_worker.device.runner import Between, RunnerContext
from batchery_worker.feeders.memory import (
    MAX_TEXTS,
    SLOTS,
    Computed,
    Hello,
    Request,
    SharedRows,
)
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.models.text_items import EmbeddingItems
from batchery_worker.work import Work

logger = logging.getLogger("batchery.device")

#: How often a feeder that waits for the card looks whether an urgent batch has come.
LOOK_MS = 2.0


@dataclass(slots=True, eq=False)
class Part:
    """Texts of a batch that fit into a slot."""

    #: Their places among the items of the batch.
    places: Sequence[int]
    slot: int | None = None
    answer: Computed | None = None
    #: Whether its batch waits for it no longer.
    is_late: bool = False


@dataclass(slots=True, eq=False)
class Parts:
    """The texts of a batch, and how far they are."""

    items: Sequence[Any]
    #: Not sent yet; and sent, in that order.
    left: deque[Part]
    sent: deque[Part] = field(default_factory=deque)


class FeederRunner:
    """Has embeddings computed by the process of the card; see `Runner`."""

    def __init__(self, context: RunnerContext) -> None:
        """Connects later."""
        self._context = context
        self._items = EmbeddingItems()
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._free = [*range(SLOTS)]
        #: Of the batches that were begun here; and by slot, what the card has.
        self._batches: dict[DeviceBatch, Parts] = {}
        self._sent: dict[int, Part] = {}
        self._hello: Hello
        self._memory: SharedRows

    def start(self) -> None:
        """Waits until the process of the card has loaded the model.

        Raises:
            DeviceUnavailable: That process has ended.
        """
        setup = self._context.setup
        try:
            self._end.connect(setup.address)
            self._hello = pickle.loads(read_frame(self._end))
            self._items.open(self._hello.items)
            self._memory = SharedRows.create(self._hello, self._end)
        except (EOFError, OSError) as error:
            ended = f"{setup.name}: the process of its card has ended while it started"
            raise errors.DeviceUnavailable(ended) from error
        threading.Thread(target=self._watch, name="batchery-card", daemon=True).start()

    def choose(self, batch: DeviceBatch) -> str:
        """There is one model; returns its identity."""
        batch.version = self._hello.version
        return self._hello.identity

    def prepare(self, batch: DeviceBatch, items: list[Any]) -> Sequence[Any]:
        """Validates and tokenizes items."""
        return prepare(self._items, items, batch.work.keywords)

    def make_ready(self, batch: DeviceBatch) -> bool:  # noqa: ARG002 - as `Runner`
        """The model is always ready."""
        return False

    def may_interrupt(self, batch: DeviceBatch) -> bool:  # noqa: ARG002
        """The process of the card runs what is urgent between two passes."""
        return True

    def run(self, batch: DeviceBatch, items: list[Any], between: Between) -> list[Any]:
        """Has prepared items computed, as many at once as there is room for."""
        parts = self._batches.get(batch) or self._begin(batch, items)
        outcomes = [*items]
        while parts.sent or parts.left:
            self._send(batch, parts)
            if not parts.left:
                between.start_next()
            if not parts.sent:
                # Parts that came too late have all the room.
                self._read_answer()
                continue
            part = parts.sent[0]
            answer = self._await(part, between, batch.work.soft_time_limit_s)
            parts.sent.popleft()
            if answer is None:
                late = Failed(SoftTimeLimitExceeded(batch.work.soft_time_limit_s))
                results: Sequence[Any] = [late] * len(part.places)
            else:
                results = self._read(part, parts, answer, batch.work)
                batch.computed_tokens += answer.tokens
                batch.computed_ms += answer.took_ms
            for place, outcome in zip(part.places, results, strict=True):
                outcomes[place] = outcome
        del self._batches[batch]
        batch.tokens += sum(each.shape[1] for each in items if not isinstance(each, Failed))
        return outcomes

    def start_ahead(self, batch: DeviceBatch) -> None:
        """Sends what there is room for of a batch whose turn comes next."""
        if batch not in self._batches:
            self._send(batch, self._begin(batch, batch.items))

    def figures(self) -> dict[str, Any]:
        """There are none: the process of the card tells of the model."""
        return {}

    def _begin(self, batch: DeviceBatch, items: Sequence[Any]) -> Parts:
        cuts = cut_parts(items, self._hello.slot_tokens)
        parts = self._batches[batch] = Parts(items, deque(map(Part, cuts)))
        return parts

    def _send(self, batch: DeviceBatch, parts: Parts) -> None:
        """Sends what there is room for; one slot is left for what is urgent."""
        work, spare = batch.work, 0 if batch.work.urgent else 1
        while parts.left and len(self._free) > spare:
            part = parts.left.popleft()
            part.slot = slot = self._free.pop()
            self._sent[slot] = part
            parts.sent.append(part)
            texts = [parts.items[place] for place in part.places]
            lengths = [text.shape[1] for text in texts]
            memory, tokens = self._memory, sum(lengths)
            np.concatenate(texts, axis=1, out=memory.rows[slot, :, :tokens], casting="same_kind")
            np.cumsum(lengths, out=memory.ends[slot, 1 : len(texts) + 1])
            memory.begun[slot] = 0
            request = Request(
                slot=slot,
                texts=len(texts),
                max_batch_size=work.max_batch_size,
                max_batch_tokens=work.max_batch_tokens,
                keywords=work.keywords,
                is_urgent=work.urgent,
                # Of suspects all are: what else is on the card must not be blamed with them.
                is_alone=batch.formed.jobs[0].recovered,
            )
            self._tell(request)

    def _tell(self, request: Request) -> None:
        try:
            write_frame(self._end, request.dump())
        except OSError:
            wait_for_end()

    def _await(self, part: Part, between: Between, limit_s: float | None) -> Computed | None:
        """The answer to a part; None if it has not come within the limit."""
        began_s = monotonic()
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while part.answer is None:
            if not poll.poll(LOOK_MS):
                between.run_urgent()
                if limit_s is not None and monotonic() - began_s > limit_s:
                    part.is_late = True
                    return None
            else:
                self._read_answer()
        return part.answer

    def _read_answer(self) -> None:
        """Reads what the card says next, of whichever part."""
        try:
            answer = Computed.load(read_frame(self._end))
        except (EOFError, OSError):
            wait_for_end()
        part = self._sent.pop(answer.slot)
        part.answer = answer
        if part.is_late:
            self._free.append(answer.slot)

    def _read(self, part: Part, parts: Parts, answer: Computed, work: Work) -> list[Any]:
        """The results of a part, whose slot is free then."""
        there = self._memory.vectors[answer.slot, : len(part.places), : answer.dimensions]
        # They are written as JSON later, when others have the slot.
        vectors = there.copy()
        self._free.append(answer.slot)
        heads = [self._items.head(parts.items[place]) for place in part.places]
        failed = {place: getattr(errors, name)(text) for place, name, text in answer.failures}
        return [
            Failed(failed[place]) if place in failed else result
            for place, result in enumerate(self._items.write(heads, vectors, work.keywords))
        ]

    def _watch(self) -> None:
        """Ends this process with that of the card; gives back first what had not begun there."""
        hangup = select.poll()
        hangup.register(self._end, 0)
        hangup.poll()
        for batch, parts in [*self._batches.items()]:
            slots = [part.slot for part in parts.sent]
            if not any(slot is not None and self._memory.begun[slot] for slot in slots):
                with suppress(Exception):
                    self._context.give_back(batch)
        logger.error("the process of %s has ended, and this one with it", self._context.setup.card)
        os._exit(os.EX_UNAVAILABLE)


def wait_for_end() -> NoReturn:
    """Waits until the thread that watches the card's process ends this one."""
    while True:
        threading.Event().wait()


def cut_parts(items: Sequence[Any], max_tokens: int) -> list[list[int]]:
    """Cuts prepared items into parts that fit into slots; returns the places of each part."""
    parts, tokens = list[list[int]](), max_tokens
    for place, item in enumerate(items):
        if isinstance(item, Failed):
            continue
        tokens += item.shape[1]
        if tokens > max_tokens or len(parts[-1]) == MAX_TEXTS:
            parts.append([])
            tokens = item.shape[1]
        parts[-1].append(place)
    return parts
