"""Tiny models of sound behind real workers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchery.execution.batch import prepare
from batchery.execution.steps import run_steps
from batchery.settings import ModelSettings
from support.sounds import save_sound_model

#: By task: its kind, and what `save_sound_model` calls the model.
TASKS = {
    "whisper": ("transcription", "whisper-en"),
    "ctc": ("transcription", "wav2vec2"),
    "label": ("audio_classification", "labels"),
    "hear": ("audio_embedding", "clap"),
}


def make_variables(folder: Path, *tasks: str) -> dict[str, str]:
    """Writes the models of tasks, unless they are there; returns the environment of a worker."""
    models = {}
    for task in tasks:
        kind, architecture = TASKS[task]
        if not (folder / architecture).exists():
            save_sound_model(folder / architecture, architecture)
        models[task] = {"kind": kind, "model": str(folder / architecture)}
    media = {"roots": [str(folder)]}
    return {"BATCHERY_MODELS": json.dumps(models), "BATCHERY_MEDIA": json.dumps(media)}


def transcribe_here(
    folder: Path, task: str, recordings: Sequence[bytes], **keywords: Any
) -> list[Any]:
    """The results of a model in this process, one recording at a time."""
    from batchery_worker.models.audio.transcription import TranscriptionModel

    kind, architecture = TASKS[task]
    settings = ModelSettings(kind=kind, model=str(folder / architecture))
    model = TranscriptionModel(settings)
    model.load("cpu")
    return [run_steps(model, prepare(model, [each], keywords), keywords)[0] for each in recordings]
