"""An app for `benchmarks.engine.pipeline`: a model on several parts, whose layers sleep."""

import json
import os
import time
from typing import Any

from celery import Celery

from batchery import ModelSettings, install, register
from batchery_worker.models.embedding import EmbeddingModel

app = install(Celery("sleeping_stages", set_as_current=False))
settings = json.loads(os.environ["SLEEPING_STAGES"])
text_s = settings.pop("text_s")


class SleepingLayers(EmbeddingModel):
    """A BERT each of whose layers takes so long for each text."""

    def load(self, device: str) -> None:
        """Loads it; from then on its layers sleep."""
        super().load(device)
        for layer in self.model.encoder.layer:
            layer.register_forward_pre_hook(_sleep)


def _sleep(_: Any, inputs: tuple[Any, ...]) -> None:
    time.sleep(text_s * len(inputs[0]))


options = {"settings": ModelSettings.model_validate(settings)}
register(app, "embed", SleepingLayers, options=options)
