"""What runs a batch: its lines are requests of the routes that everybody else calls.

A batch's file is read in slices of some hundred requests, two of which are under way at once, so
that there is always something in the queue. When all requests of a slice have an answer, these are
written as a part of the output file, under a name of its own, and the slice counts as ended. If a
worker dies, another one runs the slices that have not ended.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from batchery_producer.gateway.batches.files import FileIsGone, locate
from batchery_producer.gateway.batches.requests import Line, read_file, read_slice, write_line
from batchery_producer.gateway.batches.store import (
    BatchError,
    BatchRecord,
    RequestCounts,
    SliceState,
    Status,
)
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.guard import find_problem
from batchery_producer.gateway.problems import Kind, Problem, answer, log_failure, validate
from batchery_producer.gateway.routes import completions, openai
from batchery_producer.gateway.running import Gateway
from batchery_producer.openai_generation import CHAT_URL, TEXT_URL, ChatRequest, CompletionRequest

#: Routes that a batch may ask for: the kind of their models, the form of a body, and the function
#: that takes it.
ROUTES: dict[str, tuple[str, type[BaseModel], Callable[..., Awaitable[Response]]]] = {
    openai.EMBEDDINGS_URL: ("embedding", openai.EmbeddingsRequest, openai.embeddings),
    CHAT_URL: ("generation", ChatRequest, completions.complete_chat),
    TEXT_URL: ("generation", CompletionRequest, completions.complete_text),
}

#: Slices under way at once: while the last requests of one are awaited, the next one is there.
AHEAD = 2

#: How often a batch shows how far it is, and looks whether it is still wanted, in seconds.
LOOK_S = 1.0

#: Problems that pass, so that a request is made again: a model that has left the settings may come
#: back to them.
PASSING = (Kind.OVERLOADED, Kind.UNAVAILABLE, Kind.TIMEOUT, Kind.NOT_FOUND)

#: In how many seconds a request is made again, if its problem does not say.
RETRY_S = 5.0


class BatchRun:
    """One worker's run of a batch."""

    def __init__(self, gateway: Gateway, record: BatchRecord) -> None:
        self._gateway, self._record = gateway, record
        #: The lines of the slices that are under way, by number.
        self._open: dict[int, list[Line]] = {}
        self._answering: set[asyncio.Future[None]] = set()

    async def run(self) -> None:
        """Runs the batch to its end; cancelled, it leaves no request behind.

        Raises:
            BatcheryError: Try again.
            Problem: So is this.
        """
        errors: list[BatchError] = []
        looking = asyncio.ensure_future(self._look_on())
        try:
            if self._record.status is Status.VALIDATING:
                errors = await asyncio.to_thread(self._validate)
            if not errors:
                await self._run_slices()
        except FileIsGone as error:
            errors = [BatchError(code="file_not_found", message=error.message)]
        finally:
            looking.cancel()
            self._stop()
        await asyncio.to_thread(self._finish, errors)

    def _validate(self) -> list[BatchError]:
        """Finds the slices of the file; returns what is wrong with it."""
        record, gateway = self._record, self._gateway
        kind = ROUTES[record.endpoint][0]
        with gateway.files.open(record.owner, record.input_file_id) as file:
            found = read_file(
                file, record.endpoint, lambda name: gateway.models.find(name, (kind,)).name
            )
        counts = RequestCounts(total=found.requests)
        changes = {"model": found.model, "slices": found.slices, "request_counts": counts}

        def start(now: BatchRecord) -> BatchRecord:
            is_first = now.status is Status.VALIDATING
            return now.moved(Status.IN_PROGRESS, **changes) if is_first else now

        if not found.errors:
            self._record = gateway.batches.change(record.id, start)
        return found.errors

    async def _run_slices(self) -> None:
        record = self._record
        left = iter([each for each in range(len(record.slices)) if each not in record.ends])

        async def run_some() -> None:
            for number in left:
                if self._record.status is Status.CANCELLING:
                    return
                await self._run_slice(number)

        runs = [asyncio.ensure_future(run_some()) for _ in range(AHEAD)]
        try:
            await asyncio.gather(*runs)
        finally:
            for each in runs:
                each.cancel()

    async def _run_slice(self, number: int) -> None:
        gateway, record = self._gateway, self._record
        lines = await asyncio.to_thread(list, read_slice(record, number, gateway.files))
        self._open[number] = lines
        caller = Caller(
            record.owner, record.tenant, record.priority, 0, record.max_items, record.max_chars
        )
        answering = [asyncio.ensure_future(self._answer(line, caller)) for line in lines]
        self._answering.update(answering)
        if not self._record.is_running:
            self._stop()
        await asyncio.wait(answering)
        self._answering.difference_update(answering)
        self._record = await asyncio.to_thread(self._write, number, lines)
        del self._open[number]

    async def _answer(self, line: Line, caller: Caller) -> None:
        """Has a line answered by its route, again and again while what is wrong may pass."""
        url = self._record.endpoint
        _, form, handle = ROUTES[url]
        state = {
            "gateway": self._gateway,
            "caller": caller,
            "request_id": line.id,
            "body_bytes": line.size_bytes,
        }
        scope = {"type": "http", "method": "POST", "path": url, "headers": [], "state": state}
        while line.answer is None:
            try:
                body = validate(form, line.body)
                if getattr(body, "stream", None):
                    text = "stream: batch files have whole answers; leave it out"
                    raise Problem(Kind.INVALID, text, param="stream")
                line.answer = await handle(Request(scope, _never_hang_up), body)
            except Exception as error:  # noqa: BLE001 - it is the line's answer
                problem = find_problem(error)
                if problem.kind in PASSING:
                    await asyncio.sleep(problem.retry_after_s or RETRY_S)
                else:
                    log_failure(scope, problem, None if problem is error else error)
                    line.answer = answer(url, problem)

    async def _look_on(self) -> None:
        """Shows how far the batch is, and stops its requests when they are not wanted any more."""
        batches = self._gateway.batches
        while True:
            await asyncio.sleep(LOOK_S)
            running = {number: count_lines(lines) for number, lines in self._open.items()}
            with suppress(Problem):  # Redis is away.
                self._record = await asyncio.to_thread(batches.show, self._record.id, running)
            if not self._record.is_running:
                self._stop()

    def _stop(self) -> None:
        """Ends the requests that have no answer; their jobs are revoked."""
        for each in self._answering:
            each.cancel()

    def _write(self, number: int, lines: list[Line]) -> BatchRecord:
        """Writes what has become of the lines of a slice."""
        record, storage = self._record, self._gateway.files.storage
        state = count_lines(lines)
        state.name = f"{number}-{secrets.token_hex(8)}"
        wrong = [each for each in lines if each.is_failed]
        if record.status is not Status.CANCELLING:
            late = [each for each in lines if each.answer is None]
            state.expired = len(late)
            state.failed += len(late)
            wrong += late

        def write_answers() -> Iterator[bytes]:
            for line in lines:
                if line.answer is not None and not line.is_failed:
                    usage = orjson.loads(line.answer.body)["usage"]
                    state.input_tokens += usage["prompt_tokens"]
                    state.output_tokens += usage.get("completion_tokens", 0)
                    yield write_line(line)

        output, error = (
            f"{locate(record.owner, each)}/{state.name}" for each in record.made_files.values()
        )
        state.output_bytes = storage.write(output, write_answers())
        if wrong:
            state.error_bytes = storage.write(error, map(write_line, wrong))
        return self._gateway.batches.change(record.id, lambda now: now.advanced(number, state))

    def _finish(self, errors: list[BatchError]) -> None:
        """Ends the batch, with the files of what was written."""
        record = self._gateway.batches.change(self._record.id, lambda now: now.finished(errors))
        for kind, file_id in record.made_files.items():
            if getattr(record, f"{kind}_file_id") is None:
                self._gateway.files.storage.remove(locate(record.owner, file_id))


def count_lines(lines: list[Line]) -> SliceState:
    """How far a slice is."""
    answered = sum(each.answer is not None for each in lines)
    failed = sum(each.is_failed for each in lines)
    return SliceState(completed=answered - failed, failed=failed)


async def _never_hang_up() -> Message:
    message: Message = await asyncio.get_running_loop().create_future()
    return message
