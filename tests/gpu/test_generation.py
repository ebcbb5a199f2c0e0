"""Text generation on a CUDA device: the same tokens as `generate`, and memory that runs out."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import scaled_dot_product_attention

from batchery.settings import ModelSettings
from support.tiny_models import CORPUS
from support.tiny_writers import Driver, PlainWriter, make_prompts, save_writer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Attentions by rows of texts, and by the page.
NAME, BY_PAGE = "batchery_flash_pages", "batchery_flash_by_page"

#: Keywords of neighbours that need a tensor each on the device.
NOISE: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "logprobs": 2},
    {"temperature": 1.2, "top_p": 0.8, "n": 2},
    {"repetition_penalty": 1.5},
)

#: A step of this many tokens, each of so many numbers, needs more than this room.
LONG_STEP_TOKENS = 4096
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
ROOM_BYTES = 4 << 20

Load = Callable[..., tuple[Any, PlainWriter]]


@pytest.fixture
def writer(tmp_path: Path) -> Load:
    """Loads a tiny model, and the same as transformers runs it, both on the GPU."""
    # Older ones have another continuous batching.
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("needs transformers 5.23")
    from batchery_worker.models.generation.model import GenerationModel

    def loaded(architecture: str, config: Any = None, **settings: Any) -> tuple[Any, PlainWriter]:
        folder = save_writer(tmp_path / architecture, architecture, **(config or {}))
        wanted = {"kind": "generation", "model": str(folder), "dtype": "fp32", **settings}
        made = GenerationModel(ModelSettings.model_validate(wanted))
        made.load("cuda:0")
        plain = PlainWriter(folder)
        plain.model.to("cuda:0")
        return made, plain

    return loaded


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt2"])
def test_jobs_with_cancels_between_write_what_generate_writes(
    architecture: str, writer: Load
) -> None:
    model, plain = writer(architecture, slots=6, max_batch_tokens=24, cache_tokens=320)
    choose = random.Random(3)
    prompts = list(dict.fromkeys(make_prompts(60)))
    driver, waiting, cancelled = Driver(model), list(prompts), set(prompts[::7])
    while waiting or driver.running:
        while waiting and driver.free:
            prompt = waiting.pop()
            driver.join(prompt, prompt, max_new_tokens=12)
        driver.step()
        for prompt in cancelled.intersection(driver.running.values()):
            if choose.random() < 0.3:
                driver.leave(prompt)
    assert len(driver.outcomes) >= len(prompts) - len(cancelled)
    for prompt, outcome in driver.outcomes.items():
        assert outcome["text"] == plain.text(plain.write(prompt, 12))


def graphs(model: Any) -> set[tuple[int, ...]]:
    """Of each step that is a CUDA graph: its texts; or tokens of prompts, 0, and longest text."""
    return {*model._batch._processor.inputs_and_outputs.graphs._storage}


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        ("llama", BY_PAGE),
        ("qwen3", BY_PAGE),
        ("gpt2", BY_PAGE),
        # Of a window there are no pages.
        ("mistral", NAME),
        ("llama", NAME),
    ],
)
def test_the_kernels_for_rows_and_pages_write_what_generate_writes(
    architecture: str, attention: str, writer: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchery_worker.models.generation import paged_attention

    if attention == NAME:
        monkeypatch.setattr(paged_attention, "page_kernel", lambda: None)
    # The shortest windows and prompts of several steps; the likeliest token is so by far.
    model, plain = writer(
        architecture, dtype="fp16", slots=6, max_batch_tokens=12, cache_tokens=480
    )
    assert model.model.config._attn_implementation == attention
    captured = {each for each in graphs(model) if len(each) > 1}
    prompts = list(dict.fromkeys(make_prompts(40)))
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 12}) for each in prompts)
    right = [outcomes[each]["text"] == plain.text(plain.write(each, 12)) for each in prompts]
    # Rounding changes a token now and then.
    assert sum(right) >= 0.9 * len(prompts)
    found = graphs(model)
    texts = {each for each in found if len(each) == 1}
    assert texts == ({(1,), (2,), (4,), (6,)} if attention == BY_PAGE else set())
    # Sizes of prompts that read nothing from the cache are captured at load, all of them.
    assert bool(captured) == (attention == BY_PAGE)
    assert {each for each in found if len(each) > 1 and not each[1]} == captured


def test_a_model_that_cannot_be_captured_runs_without_graphs(writer: Load) -> None:
    model, plain = writer("llama", dtype="fp16", slots=6, cache_tokens=480)
    # From here on the model waits for the device, which no graph can.
    model.model.model.layers[1].register_forward_hook(lambda *_: torch.cuda.synchronize())
    model._batch.build()
    prompts = list(dict.fromkeys(make_prompts(12)))
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 12}) for each in prompts)
    right = [outcomes[each]["text"] == plain.text(plain.write(each, 12)) for each in prompts]
    assert sum(right) >= 0.8 * len(prompts)
    assert not graphs(model)
    # What failed has left nothing behind.
    torch.cuda.empty_cache()
    torch.randn(8, device="cuda:0")


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(32, 8, 64), (12, 12, 80), (16, 1, 128)])
@pytest.mark.parametrize("programs", [1, 1 << 20])
def test_attention_by_the_page_is_that_of_each_text_alone(
    heads: int, key_heads: int, width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchery_worker.models.generation import page_kernel

    monkeypatch.setattr(page_kernel, "PROGRAMS", programs)
    lengths, page_tokens = [1, 31, 32, 33, 700, 0], 32
    numbers: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda:0"}
    pages = [torch.randn((64, page_tokens, key_heads, width), **numbers) for _ in range(2)]
    texts = len(lengths)
    query, key, value = (
        torch.randn((count, texts, width), **numbers).transpose(0, 1)
        for count in (heads, key_heads, key_heads)
    )
    # The pages of a text are anywhere; no two texts have the same.
    tables = torch.zeros((texts, 22), dtype=torch.int32)
    free = torch.randperm(64).int()
    for row, length in enumerate(lengths):
        count = -(-length // page_tokens)
        tables[row, :count], free = free[:count], free[count:]
    tables = tables.to("cuda:0")
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to("cuda:0")
    before = [each.clone() for each in pages]
    out = page_kernel.attend_pages(
        *(query, key, value),
        key_pages=pages[0],
        value_pages=pages[1],
        tables=tables,
        key_ends=ends,
        scale=width**-0.5,
    )
    for row, length in enumerate(lengths):
        if length == 0:
            assert not out[row].any()
            continue
        ids = tables[row, : -(-length // page_tokens)].long()
        for old, new in zip(before, (key, value), strict=True):
            old[ids[-1], (length - 1) % page_tokens] = new[row]
        keys, values = (each[ids].flatten(0, 1)[:length].transpose(0, 1) for each in before)
        right = scaled_dot_product_attention(
            *(query[row, :, None].float(), keys.float(), values.float()), enable_gqa=True
        )
        assert (out[row].float() - right[:, 0]).abs().max() < 0.02
    assert all(torch.equal(*each) for each in zip(pages, before, strict=True))


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_models_with_an_encoder_write_what_generate_writes(architecture: str, writer: Load) -> None:
    model, plain = writer(architecture, slots=4)
    prompts = list(dict.fromkeys(make_prompts(12)))
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 9}) for each in prompts)
    for prompt in prompts:
        tokens = plain.write(prompt, 9)
        assert outcomes[prompt]["text"] == plain.text(tokens)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_and_all_keywords_run_side_by_side(dtype: str, writer: Load) -> None:
    # Weights as models have them: with the large ones of the tests, errors of bf16 grow.
    model, _ = writer("llama", {"initializer_range": 0.05}, dtype=dtype, slots=5)
    jobs = [
        (number, prompt, {"max_new_tokens": 10, "ignore_eos": True, **NOISE[number % 4]})
        for number, prompt in enumerate(make_prompts(20))
    ]
    outcomes = Driver(model).run(iter(jobs))
    for number, outcome in outcomes.items():
        assert outcome["tokens_out"] == 10 * jobs[number][2].get("n", 1)
        assert len(outcome.get("logprobs", ())) == (10 if "logprobs" in jobs[number][2] else 0)


def test_output_that_is_not_finite_fails_its_job_alone(writer: Load) -> None:
    model, _ = writer("llama")
    with torch.no_grad():
        model.model.get_input_embeddings().weight[5] = float("nan")
    jobs = [("bad", [5, 6], {}), ("good", [6, 7], {"max_new_tokens": 1})]
    outcomes = Driver(model).run(iter(jobs))
    assert "not finite" in str(outcomes["bad"].exception)
    assert outcomes["good"]["tokens_out"] == 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_memory_that_really_runs_out_costs_no_job(dtype: str, writer: Load) -> None:
    model, plain = writer(
        "llama",
        dtype=dtype,
        config={"max_position_embeddings": 2 * LONG_STEP_TOKENS, **WIDE},
        slots=3,
        max_batch_tokens=LONG_STEP_TOKENS,
        cache_tokens=3 * LONG_STEP_TOKENS,
    )
    prompts = [" ".join([each] * 150) for each in CORPUS[:3]]
    expected = [plain.text(plain.write(prompt, 6)) for prompt in prompts]
    size = model._batch.size
    gc.collect()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    allowed_bytes = torch.cuda.memory_reserved() + ROOM_BYTES
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes, 0)
    try:
        outcomes = Driver(model).run((prompt, prompt, {"max_new_tokens": 6}) for prompt in prompts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert all(outcomes[prompt]["tokens_out"] for prompt in prompts)
    if dtype == "fp32":
        assert [outcomes[prompt]["text"] for prompt in prompts] == expected
    assert model._batch.size != size
