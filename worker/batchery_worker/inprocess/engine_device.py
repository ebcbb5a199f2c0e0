"""Where an engine computes: on a device of this process, or in a worker's device process."""

import logging
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from time import monotonic
from typing import Any

from batchery.errors import BatcheryError, DeviceDied, ModelLoadError
from batchery.execution.batch import are_same, prepare
from batchery.outcomes import Failed
from batchery.tracebacks import with_frames
from batchery_worker.device.loading import EngineModel
from batchery_worker.device.served_model import LoadedModel
from batchery_worker.device_pool.process import DeviceProcess, start_process
from batchery_worker.device_pool.startup import levels_of_loggers
from batchery_worker.ipc.messages import Done, NotReady, Reply, Setup, dump_message

#: Says which batch comes next, if that is known: its items and its keywords.
LookAhead = Callable[[], tuple[list[Any], Mapping[str, Any]] | None]


logger = logging.getLogger("batchery.device")


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What became of a batch.

    Attributes:
        outcomes: One per item, in order.
        tokens: Tokens of the items.
        computed_tokens: Tokens that were computed, with padding.
    """

    outcomes: list[Any]
    tokens: int
    computed_tokens: int


class LocalDevice:
    """Computes on the calling thread, always the same one: CUDA knows a device per thread."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._served: LoadedModel | None = None
        #: Why it computes nothing any more, until it is closed; empty while it does.
        self.problem = ""
        #: The batch that comes next: its items as they were given, and prepared.
        self._ahead: tuple[Sequence[Any], Mapping[str, Any], list[Any]] | None = None

    def load(self) -> None:
        """Loads the model and warms it up."""
        _, self._served = self._model.serve()

    def run(
        self, items: Sequence[Any], keywords: Mapping[str, Any], look_ahead: LookAhead
    ) -> BatchAnswer:
        """Computes one batch; prepares the next one while passes run that were only launched."""
        served = self._served
        assert served is not None
        if self.problem:
            return self._refuse(items)
        prepared = self._prepared(items, keywords)
        self._ahead = None

        def start_next() -> None:
            if self._ahead is None:
                following = look_ahead()
                if following is None:
                    return
                self._ahead = (*following, prepare(served.model, *following))
            _, coming, ready = self._ahead
            served.start(ready, self._model.work(0, coming))

        work = self._model.work(0, keywords)
        try:
            answer = BatchAnswer(*served.compute(prepared, work, nullcontext, start_next))
        except DeviceDied as error:
            self.problem = f"{error}; only a new process can use this device"
            return self._refuse(items)
        for each in answer.outcomes:
            show_origin(each)
        return answer

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` would show of the model."""
        return {} if self._served is None else self._served.figures()

    def close(self) -> None:
        """Frees the model."""
        served, self._served, self._ahead = self._served, None, None
        if served is not None and not self.problem:
            served.model.unload()

    def _refuse(self, items: Sequence[Any]) -> BatchAnswer:
        # Not raised: halves of the batch would try it again.
        return BatchAnswer([Failed(DeviceDied(self.problem)) for _ in items], 0, 0)

    def _prepared(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """The items, prepared now or before: callers may have given up in between."""
        assert self._served is not None
        if self._ahead is not None:
            ahead, same_keywords, prepared = self._ahead
            if keywords == same_keywords and are_same(items, ahead):
                return prepared
        return prepare(self._served.model, items, keywords)


def show_origin(outcome: Any) -> None:
    """Lets the exception of a failure show where it was raised."""
    if isinstance(outcome, Failed) and outcome.frames:
        with_frames(outcome.exception, outcome.frames)


class SpawnedDevice:
    """Computes in a process of its own, which is started anew after it died."""

    #: The next process can compute again, whatever ended this one.
    problem = ""

    def __init__(
        self, model: EngineModel, start_timeout_s: float, max_pass_s: float | None = None
    ) -> None:
        """Starts no process yet.

        Args:
            model: To be pickled.
            start_timeout_s: How long the process may take to load the model, in seconds.
            max_pass_s: How long it may take to answer a batch, in seconds; None for ever.
        """
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._max_pass_s = max_pass_s
        self._device: DeviceProcess | None = None
        self._selector: DefaultSelector
        self._number = 0
        #: The batch that was sent before its turn: its items, its keywords, its number.
        self._ahead: tuple[Sequence[Any], Mapping[str, Any], int] | None = None
        #: Answers that were read before their turn, by number.
        self._answers: dict[int, Done] = {}

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        device = self._device
        return None if device is None else device.pid

    def load(self) -> None:
        """Starts the process, which loads the model.

        Raises:
            ModelLoadError: The model cannot be loaded or pickled, or the process died or took too
                long.
            DeviceUnavailable: The device does not exist.
        """
        name = f"model {self._model.name!r}: "
        setup = Setup(
            self._model.name, sys.path, "", (), (), levels_of_loggers(), model=self._pickled()
        )
        device = DeviceProcess(setup, start_process)
        try:
            device.spawn()
        except OSError as error:
            text = f"{name}its device process cannot be started: {error}"
            raise ModelLoadError(text) from error
        assert device.link is not None
        self._device, self._selector = device, DefaultSelector()
        self._selector.register(device.link.reader, EVENT_READ)
        try:
            [ready] = self._receive(device, self._start_timeout_s)
        except TimeoutError:
            self._stop(kill_at_once=True)
            raise ModelLoadError(
                f"{name}its device process was not ready within"
                f" {self._start_timeout_s:g} s (setting device_start_timeout_s)"
            ) from None
        except EOFError:
            ending = self._stop()
            text = f"{name}its device process died while it loaded: {ending}"
            raise ModelLoadError(text) from None
        if isinstance(ready, NotReady):
            self._stop()
            raise ready.exception()

    def run(
        self, items: Sequence[Any], keywords: Mapping[str, Any], look_ahead: LookAhead
    ) -> BatchAnswer:
        """Computes one batch there; sends the next one before its turn if it is full already.

        Raises:
            DeviceDied: The process died. Halves of the batch may run in the next one. An item that
                was alone has had two processes, as the first may have died of something else.
            InvalidItem: The process cannot read the items.
            Exception: The items cannot be pickled.
        """
        try:
            return self._run_once(items, keywords, look_ahead)
        except DeviceDied:
            if len(items) > 1:
                raise
        return self._run_once(items, keywords, look_ahead)

    def _run_once(
        self, items: Sequence[Any], keywords: Mapping[str, Any], look_ahead: LookAhead
    ) -> BatchAnswer:
        try:
            device = self._revived()
        except BatcheryError as error:
            # Not raised: halves of the batch would try it again.
            return BatchAnswer([Failed(error) for _ in items], 0, 0)
        number, self._ahead = self._number_ahead(items, keywords), None
        if number is None:
            self._answers.clear()
            number = self._send(device, items, keywords)
        self._send_ahead(device, look_ahead)
        try:
            while number not in self._answers:
                for reply in self._receive(device, self._max_pass_s):
                    # Those before it are of batches that nobody wanted any more.
                    if isinstance(reply, Done) and reply.id >= number:
                        self._answers[reply.id] = reply
        except EOFError:
            raise self._died() from None
        except TimeoutError:
            limit = f"no answer for {self._max_pass_s:g} s (setting max_pass_s)"
            raise self._died(f"{limit}; it was ", kill_at_once=True) from None
        return _read_answer(self._answers.pop(number), len(items))

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` would show of the model, as the process told last."""
        device = self._device
        models = {} if device is None else device.reported.get("models", {})
        return dict(models.get(self._model.name, {}))

    def close(self) -> None:
        """Ends the process."""
        if self._device is not None:
            self._stop()

    def _pickled(self) -> bytes:
        try:
            return pickle.dumps(self._model, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise ModelLoadError(
                f"model {self._model.name!r}: it cannot be pickled for its device process"
                f" ({error}); load in `load` what cannot be pickled"
            ) from error

    def _revived(self) -> DeviceProcess:
        """The process; it may have died since, and nothing was lost then."""
        if self._device is not None and self._device.has_ended:
            self._died()
        if self._device is None:
            self.load()
        assert self._device is not None
        return self._device

    def _number_ahead(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> int | None:
        """The number of these items if they were sent; the answer to any others is dropped."""
        if self._ahead is None:
            return None
        sent, same_keywords, number = self._ahead
        return number if keywords == same_keywords and are_same(items, sent) else None

    def _send(
        self, device: DeviceProcess, items: Sequence[Any], keywords: Mapping[str, Any]
    ) -> int:
        """Sends a batch, as much as the pipe takes; returns its number."""
        content = pickle.dumps((list(items), keywords), protocol=pickle.HIGHEST_PROTOCOL)
        self._number += 1
        assert device.link is not None
        device.link.send(dump_message(self._model.work(self._number, {}, content)))
        return self._number

    def _send_ahead(self, device: DeviceProcess, look_ahead: LookAhead) -> None:
        following = look_ahead()
        if following is None:
            return
        try:
            self._ahead = (*following, self._send(device, *following))
        except Exception:  # noqa: BLE001 - at its turn it fails by itself
            return

    def _receive(self, device: DeviceProcess, timeout_s: float | None) -> list[Reply]:
        """Waits for messages; meanwhile the pipe takes what was not written yet.

        Raises:
            TimeoutError: There was none within this time, in seconds.
        """
        assert device.link is not None
        deadline_s = None if timeout_s is None else monotonic() + timeout_s
        while True:
            events = EVENT_READ if device.link.flush() else EVENT_READ | EVENT_WRITE
            self._selector.modify(device.link.reader, events)
            left_s = None if deadline_s is None else deadline_s - monotonic()
            if not self._selector.select(left_s):
                raise TimeoutError
            if replies := device.receive():
                return replies

    def _died(self, why: str = "", *, kill_at_once: bool = False) -> DeviceDied:
        """Cleans up after the process."""
        ending = self._stop(kill_at_once=kill_at_once)
        text = f"{self._model.name}: its device process died: {why}{ending}"
        logger.warning("%s; the next batch starts another one", text)
        return DeviceDied(text)

    def _stop(self, *, kill_at_once: bool = False) -> str:
        """Ends the process, by force if need be; returns how it ended."""
        device, self._device, self._ahead = self._device, None, None
        assert device is not None
        self._answers.clear()
        self._selector.close()
        return device.stop(kill_at_once=kill_at_once)


def _read_answer(done: Done, items: int) -> BatchAnswer:
    """Reads what became of so many items.

    Raises:
        InvalidItem: The process could not read them; halves show which one it is.
    """
    outcomes: list[Any] = pickle.loads(done.jobs[0][1][0])
    if len(outcomes) < items:
        raise outcomes[0].exception
    for each in outcomes:
        show_origin(each)
    return BatchAnswer(outcomes, done.tokens, done.computed_tokens)
