"""What every step of the check knows, and the difference between a GPU and a dry run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from batchery.settings import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from benchmarks.gpu_check.model_files import build_folder_name

#: Clock cycles that keep a GPU busy while a pass is launched behind them: some 30 ms.
BUSY_CYCLES = 50_000_000

#: Untyped in part.
CUDA: Any = torch.cuda


@dataclass
class Check:
    """Where the steps run.

    Attributes:
        device: As torch spells it.
        dry: Everything runs on the CPU, with tiny models and stand-ins for CUDA.
        folder: Where models are made.
        limit_s: Time of the step that runs, in seconds.
    """

    device: str
    dry: bool
    folder: Path
    limit_s: float = 60.0
    _models: dict[tuple[str, str], EmbeddingModel] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The number format of all models."""
        return "fp32" if self.dry else "bf16"

    def repeats(self, count: int) -> int:
        """How often something is repeated."""
        return min(count, 3) if self.dry else count

    def model(self, name: str, **settings: Any) -> EmbeddingModel:
        """A loaded model; loaded once for the same settings."""
        folder = str(build_folder_name(name, self.folder, tiny=self.dry))
        # In a dry run, several names have one model.
        key = (folder, repr(sorted(settings.items())))
        if key not in self._models:
            wanted = {
                "kind": "embedding",
                "model": folder,
                "dtype": self.dtype,
                "cuda_graphs": "never",
                **settings,
            }
            model = EmbeddingModel(ModelSettings.model_validate(wanted))
            model.load(self.device)
            self._models[key] = model
        return self._models[key]

    def wait(self) -> None:
        """Waits until the device has computed everything."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def device_ms(self, run: Callable[[], Any]) -> float:
        """How long the device computes what is launched, without the gaps that launching leaves."""
        if self.dry:
            started_s = time.perf_counter()
            run()
            return (time.perf_counter() - started_s) * 1e3
        began, ended = (CUDA.Event(enable_timing=True) for _ in range(2))
        CUDA._sleep(BUSY_CYCLES)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))
