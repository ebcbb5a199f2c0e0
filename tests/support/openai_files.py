"""Files and batches of requests for embeddings, by openai's own client."""

import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types import Batch

from support.gateway import GatewayProcess
from support.harness import wait_for
from support.patience import patient

#: Statuses of a batch that is over.
OVER = ("completed", "failed", "expired", "cancelled")


def client_of(gateway: GatewayProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def request(id_: str, given: Any, model: str = "embed", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": id_,
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": model, "input": given, **body},
    }


def upload(api: openai.OpenAI, rows: Sequence[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file = ("requests.jsonl", "\n".join(lines).encode())
    return api.files.create(file=file, purpose="batch").id


def begin(api: openai.OpenAI, rows: Sequence[Any], window: str = "24h") -> Batch:
    created: Batch = api.batches.create(
        input_file_id=upload(api, rows),
        endpoint="/v1/embeddings",
        completion_window=window,  # type: ignore[arg-type]
        metadata={"made by": "a test"},
    )
    return created


def end_of(api: openai.OpenAI, batch_id: str, timeout_s: float = patient(60)) -> Batch:
    def over() -> Batch | None:
        batch: Batch = api.batches.retrieve(batch_id)
        return batch if batch.status in OVER else None

    found = wait_for(over, "the batch to be over", timeout_s)
    assert found is not None
    return found


def lines_of(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    found = batch.request_counts
    assert found is not None
    return found.total, found.completed, found.failed
