"""Generation with transformers and nothing around it: the measure for the engine and the queue.

The lengths are given, and no text ends before. Greedy, so that all ways write the same.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    logging,
)
from transformers import GenerationConfig as _GenerationConfig

from benchmarks.peers.generation_jobs import Job, answering, arguments
from benchmarks.peers.text_peer import serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Without types of its own.
GenerationConfig: Any = _GenerationConfig

#: Tokens of a page of the cache, as `generate_batch` has it where nobody says.
PAGE_TOKENS = 256


class Loaded:
    """Tokenizer and model, and the ways to use them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=DTYPES[options.dtype]
        )
        self.model.to(options.device).eval()
        # Or the model's own would fill in what is left out: where to end, and how to draw.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self.model.config.eos_token_id = None

    def one_by_one(self, jobs: Sequence[Job]) -> Sequence[str]:
        """As anybody does first."""
        return [self._generate([job])[0] for job in jobs]

    def static_by_prompt(self, jobs: Sequence[Job]) -> Sequence[str]:
        """Batches of equally long prompts, which is all that one knows beforehand."""
        return self._static(jobs, lambda job: len(job.prompt))

    def static_by_length(self, jobs: Sequence[Job]) -> Sequence[str]:
        """Batches of equally long texts, as if one knew their lengths."""
        return self._static(jobs, lambda job: job.tokens)

    def generate_batch(self, jobs: Sequence[Job]) -> Sequence[str]:
        """Its continuous batching: `generate_batch`, with a length for each text.

        It makes and warms up what it needs at each call, as `generate_batch` does.
        """
        options = self.options
        pages = options.slots * -(-options.max_length // PAGE_TOKENS)
        config = ContinuousBatchingConfig(
            num_blocks=pages,
            max_batch_tokens=options.step_tokens,
            max_requests_per_batch=options.slots,
            auto_switch_to_flash=False,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=config, timeout=5
        ) as manager:
            for number, job in enumerate(jobs):
                ids = self.tokenizer(job.prompt)["input_ids"]
                manager.add_request(ids, str(number), max_new_tokens=job.tokens)
            while len(found) < len(jobs):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
                elif not manager.is_running():
                    raise SystemExit("generate_batch: its thread has ended")
        return [self._text(found[str(number)], job) for number, job in enumerate(jobs)]

    def _static(self, jobs: Sequence[Job], key: Callable[[Job], int]) -> Sequence[str]:
        order = sorted(range(len(jobs)), key=lambda index: key(jobs[index]), reverse=True)
        texts: dict[int, str] = {}
        for start in range(0, len(order), self.options.slots):
            some = order[start : start + self.options.slots]
            texts.update(zip(some, self._generate([jobs[each] for each in some]), strict=True))
        return [texts[index] for index in range(len(jobs))]

    @torch.inference_mode()
    def _generate(self, jobs: Sequence[Job]) -> Sequence[str]:
        """One batch, until the longest is done."""
        prompts = [self.tokenizer(job.prompt)["input_ids"] for job in jobs]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
        made = self.model.generate(
            input_ids=ids.to(self.options.device),
            attention_mask=mask.to(self.options.device),
            max_new_tokens=max(job.tokens for job in jobs),
        )[:, longest:].tolist()
        return [self._text(tokens, job) for tokens, job in zip(made, jobs, strict=True)]

    def _text(self, tokens: Sequence[int], job: Job) -> str:
        if len(tokens) < job.tokens:
            raise SystemExit(f"{len(tokens)} tokens were generated instead of {job.tokens}")
        text: str = self.tokenizer.decode(tokens[: job.tokens], skip_special_tokens=True)
        return text


WAYS: Mapping[str, Callable[[Loaded, Sequence[Job]], Sequence[str]]] = {
    "one by one": Loaded.one_by_one,
    "static by prompt": Loaded.static_by_prompt,
    "static by length": Loaded.static_by_length,
    "generate_batch": Loaded.generate_batch,
}


def main() -> None:
    """Answers runs."""
    options = arguments()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = Loaded(options)
    serve(answering(lambda jobs: WAYS[options.way](loaded, jobs)))


if __name__ == "__main__":
    main()
