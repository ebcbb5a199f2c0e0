"""The texts of a request in batches, and what models make of them: text classification."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchery_producer.answers import BatchSummary, Outcome

#: Digits after the point of times and rates.
DIGITS = 6


def cut(texts: Sequence[str], batch_size: int) -> list[Sequence[str]]:
    """Cuts texts into batches, in order."""
    return [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]


def labelled(texts: Sequence[str], outcomes: Sequence[Outcome], start: int) -> list[dict[str, Any]]:
    """The label of each text.

    Args:
        texts: The texts.
        outcomes: That of each; all succeeded.
        start: Place of the first text in its request.
    """
    return [
        {
            "text": text,
            "sentiment": outcome.value["label"],
            "confidence": outcome.value["score"],
            "token_count": outcome.value["tokens"],
            "processing_order": order,
            "truncated": outcome.value.get("truncated", False),
        }
        for order, (text, outcome) in enumerate(zip(texts, outcomes, strict=True), start)
    ]


def collect_batches(outcomes: Iterable[Outcome]) -> set[BatchSummary]:
    """The batches in which items were computed; results from a cache have none."""
    return {outcome.batch for outcome in outcomes if outcome.batch is not None}


def list_devices(batches: Iterable[BatchSummary]) -> str | None:
    """The devices that computed, with commas between them; None if unknown."""
    return ", ".join(sorted({batch.device for batch in batches})) or None


def per_s(count: int, seconds: float) -> float:
    """A rate; 0 if no time has passed."""
    return round(count / seconds, 3) if seconds > 0 else 0.0


def held_length(max_length: int, results: Iterable[Mapping[str, Any]]) -> int:
    """How many tokens were read of a text at most; a text that was cut tells the model's limit.

    Args:
        max_length: What was asked for.
        results: As from `labelled`.
    """
    cut_at = (result["token_count"] for result in results if result["truncated"])
    return min(cut_at, default=max_length)
