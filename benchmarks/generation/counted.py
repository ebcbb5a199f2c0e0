"""The kind `generation`, which writes down what it computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchery.model import Advance
from batchery.settings import ModelSettings
from batchery_worker.models.generation.model import GenerationModel
from benchmarks.generation.ledger import Ledger


class CountedModel(GenerationModel):
    """Writes a line into a ledger at each step, and for each text that goes on."""

    def __init__(self, settings: dict[str, Any], ledger: str) -> None:
        super().__init__(settings=ModelSettings(**settings))
        self._folder = Path(ledger)

    def load(self, device: str) -> None:
        """As the kind does."""
        super().load(device)
        self._ledger = Ledger(self._folder)

    def join(self, slot: int, prepared: Any, pieces: Sequence[Any], **keywords: Any) -> None:
        """As the kind does."""
        super().join(slot, prepared, pieces, **keywords)
        if pieces:
            self._ledger.write(fed_again=sum(len(each["tokens"]) for each in pieces))

    def step(self) -> list[Advance]:
        """As the kind does."""
        advances = super().step()
        self._ledger.write(
            generated=sum(len(each.piece["tokens"]) for each in advances if each.piece)
        )
        return advances
