"""The app of the workers that are measured: models from the environment, and two of our own."""

import json
import os

from celery import Celery

from batchery import install, register
from benchmarks.generation.metronome import Metronome

#: Redis for messages and results, and what else a worker is told.
URL = os.environ.get("GENERATION_URL", "redis://127.0.0.1:1/0")
OPTIONS = json.loads(os.environ.get("GENERATION_OPTIONS", "{}"))

app = install(Celery("generation", broker=URL, backend=URL))

if slots := OPTIONS.get("metronome_slots"):
    register(app, "metronome", Metronome, slots=slots, options={"step_ms": OPTIONS["step_ms"]})
if counted := OPTIONS.get("counted"):
    register(
        app,
        "counted",
        # A path, so that the worker's main process does not import torch.
        "benchmarks.generation.counted:CountedModel",
        slots=counted["settings"]["slots"],
        options=counted,
    )
