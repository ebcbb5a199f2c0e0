"""The one way from a request to the queue: items in, outcomes back."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from batchery_producer.answers import Outcome
from batchery_producer.async_client import AsyncClient, AsyncTask
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.models.served_models import ServedModel
from batchery_producer.gateway.monitoring.absence import Absence
from batchery_producer.gateway.monitoring.measurements import Measurements
from batchery_producer.gateway.problems import Kind, Problem, build_problem

T = TypeVar("T")

#: Items in one message of a request with several: few enough that several devices share a request,
#: and so many that a message costs little per item.
ITEMS_PER_JOB = 8

#: In how many seconds a caller wants its answer; at most the setting `gateway.timeout_s`.
TIMEOUT_HEADER = "x-request-timeout"


class Inference:
    """Runs the items of requests."""

    def __init__(
        self, client: AsyncClient, timeout_s: float, measurements: Measurements, absence: Absence
    ) -> None:
        """Prepares.

        Args:
            client: Sends the jobs.
            timeout_s: How long a request waits for its results at most, in seconds.
            measurements: Where results are counted.
            absence: Which models have no worker.
        """
        self._absence = absence
        self._measurements = measurements
        self._client = client
        self._timeout_s = timeout_s

    async def values(
        self,
        request: Request,
        model: ServedModel,
        items: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """The result of each item, in order.

        Raises:
            Problem: That of the first item that failed, or why there are no results.
        """
        outcomes = await self.outcomes(request, model, items, keywords)
        check_all(outcomes)
        return [outcome.value for outcome in outcomes]

    async def outcomes(
        self,
        request: Request,
        model: ServedModel,
        items: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
        per_job: int = ITEMS_PER_JOB,
    ) -> list[Outcome]:
        """How each item ended, in order; if the caller hangs up, the jobs are revoked.

        Raises:
            Problem: There are no outcomes: no time, no space, no worker, no Redis.
        """
        try:
            outcomes = await self.run(request, model, items, keywords, per_job)
        except Problem:
            raise
        except Exception as error:
            raise build_problem(error) from error
        self._measurements.results(model.name, outcomes)
        return outcomes

    def check_worker(self, model: ServedModel) -> None:
        """Makes sure that a model may have a worker.

        Raises:
            Problem: It has none.
        """
        self._absence.check(model.name, model.queue)

    async def run(
        self,
        request: Request,
        model: ServedModel,
        items: Sequence[Any],
        keywords: Mapping[str, Any] | None,
        per_job: int,
    ) -> list[Outcome]:
        """As `outcomes`, but counts nothing.

        Raises:
            Exception: There are no outcomes; `build_problem` says why.
        """
        task = self._task(request, model.name, model.queue)
        async with self._absence.refusing(model.name, model.queue):
            return await unless_gone(
                request, task.outcomes(items, per_job=per_job, keywords=keywords)
            )

    def _task(self, request: Request, name: str, queue: str) -> AsyncTask:
        """A task on behalf of the caller: their tenant and class, and the time that they have."""
        caller: Caller = request.state.caller
        timeout_s = self.timeout_s(request)
        options: dict[str, Any] = {"queue": queue}
        if caller.priority is not None:
            options["priority"] = caller.priority
        return self._client.task(
            name, timeout_s=timeout_s, tenant=caller.tenant, deadline_s=timeout_s, **options
        )

    def timeout_s(self, request: Request) -> float:
        """How long a request waits for its results, in seconds.

        Raises:
            Problem: Its header is no number of seconds.
        """
        given = request.headers.get(TIMEOUT_HEADER)
        if given is None:
            return self._timeout_s
        try:
            asked_s = float(given)
        except ValueError:
            asked_s = 0.0
        if not asked_s > 0:
            raise Problem(
                Kind.INVALID, f"header X-Request-Timeout is {given!r:.40}: expected seconds above 0"
            )
        return min(asked_s, self._timeout_s)


def check_all(outcomes: Sequence[Outcome]) -> None:
    """Makes sure that all items of a request succeeded.

    Raises:
        Problem: That of the first item that failed.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            problem = build_problem(outcome.error)
            if len(outcomes) > 1:
                problem.message = f"item {outcome.index}: {problem.message}"
            raise problem


async def unless_gone(request: Request, call: Awaitable[T]) -> T:
    """Awaits a call, and cancels it when its caller hangs up.

    Raises:
        Problem: The caller has gone, so nobody reads an answer; or the process ends.
    """
    answer = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise gone.result()
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> Problem:
    # A body that no route wanted may be there still.
    try:
        while (await request.receive())["type"] != "http.disconnect":
            pass
    except Problem as problem:
        return problem
    return Problem(Kind.GONE, "the caller has hung up")
