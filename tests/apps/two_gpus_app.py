"""Batch functions on two GPUs: `two_gpus/torch` stands in for torch in its device processes."""

from typing import Any

from celery import Celery

from batchery import BatchTask, install

try:
    import torch

    #: An import that touches CUDA, as many do.
    AT_IMPORT = torch.cuda.current_device()
except Exception:  # noqa: BLE001 - the tests' own process has the real torch, and no GPU
    AT_IMPORT = -1

app = install(Celery("two_gpus", set_as_current=False))
app.conf.batchery_devices = ["cuda:0", "cuda:1"]
app.conf.batchery_memory_fraction = 0.5


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=1)
def where(self: Any, numbers: list[int]) -> list[Any]:
    """What a function is told of its device, and what torch says of it."""
    cuda: Any = torch.cuda
    return [(self.request.device, AT_IMPORT, cuda.contexts, cuda.fractions) for _ in numbers]


@app.task(shared=False, base=BatchTask, max_batch_size=4)
def fragile(texts: list[str]) -> list[str]:
    """One text ends the context; all that comes after it fails then."""
    cuda: Any = torch.cuda
    if "bad" in texts:
        cuda.break_context()
    cuda.synchronize()
    return [text.upper() for text in texts]
