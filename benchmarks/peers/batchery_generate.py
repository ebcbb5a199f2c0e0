"""Our kind `generation` in a loop of its own: no queue, no worker, no device process."""

import argparse
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from batchery import Failed
from batchery.installer import KINDS
from batchery.model import GOES_ON
from batchery.settings import ModelSettings
from benchmarks.peers.generation_jobs import Job, answering, arguments
from benchmarks.peers.text_peer import serve


def load(options: argparse.Namespace) -> Any:
    """The model, as a device process loads it."""
    module, _, name = KINDS["generation"].partition(":")
    settings = ModelSettings(
        kind="generation",
        model=options.model,
        dtype=options.dtype,
        slots=options.slots,
        max_length=options.max_length,
        cache_tokens=options.slots * options.max_length,
        max_batch_tokens=options.step_tokens,
    )
    model = getattr(import_module(module), name)(settings=settings)
    model.load(options.device)
    return model


def generate(model: Any, slots: int, jobs: Sequence[Job]) -> Sequence[str]:
    """Fills each slot that is free before the next step."""
    waiting = deque(enumerate(jobs))
    free = list(range(slots))
    running: dict[int, int] = {}
    texts: dict[int, str] = {}
    while waiting or running:
        while waiting and free:
            number, job = waiting.popleft()
            keywords = {"max_new_tokens": job.tokens, "ignore_eos": True}
            (prepared,) = model.preprocess([job.prompt], **keywords)
            slot = free.pop()
            model.join(slot, checked(prepared), (), **keywords)
            running[slot] = number
        for advance in model.step():
            if advance.outcome is not GOES_ON:
                texts[running.pop(advance.slot)] = checked(advance.outcome)["text"]
                free.append(advance.slot)
    return [texts[number] for number in range(len(jobs))]


def checked(outcome: Any) -> Any:
    """What is no failure; a failure ends the process."""
    if isinstance(outcome, Failed):
        raise SystemExit(f"a text failed: {outcome.error}")
    return outcome


def main() -> None:
    """Answers runs."""
    options = arguments()
    model = load(options)
    serve(answering(lambda jobs: generate(model, options.slots, jobs)))


if __name__ == "__main__":
    main()
