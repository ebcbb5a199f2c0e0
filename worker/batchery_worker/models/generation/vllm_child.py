"""vLLM's engine, in the environment of vLLM: this file, run as a script by that Python.

    python vllm_child.py DESCRIPTOR FRAMING

Batchery is not installed there. So this file imports the standard library and vLLM; our frames come
by the path of their file. vLLM spawns processes that import this file again, so nothing happens on
import. A frame is JSON. The first one says how to set the engine up, and is answered by `ready` or
`error`. Later ones are lists: `["generate", name, token ids, sampling]`, `["abort", name]`. The
answer to those is a list for each step, with an event for each text that went on.
"""

import asyncio
import dataclasses
import difflib
import importlib.util
import json
import socket
import sys
from typing import Any


class EngineServer:
    """Writes texts until the other end closes the pipe, or the engine dies."""

    def __init__(self, engine: Any, link: Any) -> None:
        self._engine = engine
        self._link = link
        self._running: dict[str, asyncio.Task[None]] = {}
        self._events: list[dict[str, Any]] = []
        self._loop = asyncio.get_running_loop()
        #: Set to why it ends: an empty text, or what the engine died of.
        self.ended: asyncio.Future[str] = self._loop.create_future()

    def receive(self) -> None:
        """Begins and aborts what the other end asks for."""
        try:
            frames = self._link.receive()
        except EOFError:
            self._end("")
            return
        for frame in frames:
            order, name, *rest = json.loads(frame)
            if order == "generate":
                self._running[name] = self._loop.create_task(self._generate(name, *rest))
            elif name in self._running:
                # The engine aborts a text whose reader is cancelled.
                self._running.pop(name).cancel()

    async def _generate(self, name: str, tokens: list[int], sampling: dict[str, Any]) -> None:
        try:
            outputs = self._engine.generate(
                {"type": "token", "prompt_token_ids": tokens}, make_sampling(sampling), name
            )
            async for output in outputs:
                self._report(name, **describe(output.outputs[0]))
        except Exception as error:  # noqa: BLE001
            if self._engine.errored:
                self._end(one_line(error))
                return
            # vLLM wraps what it did not expect; all else is what is wrong with the text.
            wrapped = error.__cause__ if type(error).__name__ == "EngineGenerateError" else None
            self._report(name, error=one_line(wrapped or error), refused=wrapped is None)
        self._running.pop(name, None)

    def _report(self, name: str, **event: Any) -> None:
        """Events of one step leave together, when all of its readers have run."""
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append({"name": name, **event})

    def _flush(self) -> None:
        self._link.send(json.dumps(self._events).encode())
        self._events = []
        self._write()

    def _write(self) -> None:
        if self._link.flush():
            self._loop.remove_writer(self._link.writer)
        else:
            self._loop.add_writer(self._link.writer, self._write)

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)


def make_sampling(sampling: dict[str, Any]) -> Any:
    """Makes vLLM's parameters; raises ValueError if it refuses them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = sampling.pop("structured_outputs", None)
    return SamplingParams(
        **sampling,
        structured_outputs=StructuredOutputsParams(**structured) if structured else None,
        output_kind=RequestOutputKind.DELTA,
        # The other end has the tokenizer.
        detokenize=False,
    )


def describe(part: Any) -> dict[str, Any]:
    """What one step made of one text."""
    event: dict[str, Any] = {"tokens": list(part.token_ids)}
    if part.logprobs is not None:
        event["logprobs"] = [
            (ranked[token].logprob, sorted_logprobs(ranked))
            for token, ranked in zip(part.token_ids, part.logprobs)  # noqa: B905 (an old Python)
        ]
    if part.finish_reason is not None:
        event["finish_reason"] = part.finish_reason
    return event


def sorted_logprobs(ranked: dict[int, Any]) -> list[tuple[int, float]]:
    """Tokens with their logarithms of probabilities, likeliest first."""
    return [(each, ranked[each].logprob) for each in sorted(ranked, key=lambda x: ranked[x].rank)]


def one_line(error: BaseException) -> str:
    """The text of an error, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def start_engine(options: dict[str, Any], cache_tokens: int | None) -> Any:
    """Starts the engine.

    Args:
        options: Those of vLLM's `AsyncEngineArgs`.
        cache_tokens: Of how many tokens it keeps keys and values; None for what vLLM chooses.

    Raises:
        ValueError: There is no such option, or the cache is too small.
        Exception: Whatever vLLM raises.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f", the nearest is {nearest[0]}" if nearest else ""
            raise ValueError(f"engine_options: vLLM has no option {name}{hint}")
    config = AsyncEngineArgs(**options).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if cache_tokens is not None:
        longest = config.model_config.max_model_len
        if cache_tokens < longest:
            raise ValueError(
                f"cache_tokens = {cache_tokens} is too small for one text of max_length = {longest}"
            )
        cache = config.cache_config
        # vLLM keeps one block for itself.
        cache.num_gpu_blocks_override = -(-cache_tokens // cache.block_size) + 1
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


async def serve(link: Any, setup: dict[str, Any]) -> int:
    """Runs an engine as long as the other end wants it; returns the exit code."""
    try:
        import vllm

        engine = start_engine(setup["options"], setup["cache_tokens"])
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises)
        link.send(json.dumps({"error": one_line(error)}).encode())
        return 1
    server = EngineServer(engine, link)
    longest = engine.vllm_config.model_config.max_model_len
    ready = {"version": vllm.__version__, "max_model_len": longest}
    link.send(json.dumps({"ready": ready}).encode())
    asyncio.get_running_loop().add_reader(link.reader, server.receive)
    why = await server.ended
    if why:
        link.send(json.dumps([{"died": why}]).encode())
    engine.shutdown()
    return bool(why)


def main(descriptor: int, framing_path: str) -> int:
    """Reads how to set the engine up, blocking, and serves."""
    spec = importlib.util.spec_from_file_location("batchery_framing", framing_path)
    assert spec is not None
    assert spec.loader is not None
    framing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(framing)
    end = socket.socket(fileno=descriptor)
    setup = json.loads(framing.read_frame(end))
    return asyncio.run(serve(framing.Link(end), setup))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
