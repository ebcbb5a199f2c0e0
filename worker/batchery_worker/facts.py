"""What a batch looked like, as it is told to whoever asks for one of its jobs."""

from typing import Any


def batch_facts(
    *,
    batch_id: int,
    device: str,
    size: int,
    prepare_ms: float,
    queued_ms: float,
    forward_ms: float,
    tokens: int,
    computed_tokens: int,
) -> dict[str, Any]:
    """Facts that all jobs of a batch share; `waited_ms` of each job is added to them.

    Args:
        batch_id: Counts the batches of a worker.
        device: As torch spells it.
        size: How many items shared the batch.
        prepare_ms: Time to read, validate and tokenize it.
        queued_ms: Time that it waited on the device, for one thread or another.
        forward_ms: Time that the device computed.
        tokens: Tokens of the items; 0 where the task counts none.
        computed_tokens: The same with padding.
    """
    return {
        "id": f"b{batch_id}",
        "size": size,
        "padding": round(1 - tokens / computed_tokens, 4) if computed_tokens else 0.0,
        "prepare_ms": round(prepare_ms, 3),
        "queued_ms": round(queued_ms, 3),
        "forward_ms": round(forward_ms, 3),
        "device": device,
    }
