"""The gateway's jobs, run by a worker that was started by hand, as docs/gateway.md has it."""

import json
from pathlib import Path
from typing import Any

from conftest import StartGateway, StartWorker
from support.gateway import EMBED
from support.harness import wait_for

#: Enough for several turns, so that what is in flight is looked for.
ROWS = 200


def test_a_batch_is_run_by_a_worker_that_the_gateway_did_not_start(
    start_gateway: StartGateway, start_worker: StartWorker, tmp_path: Path
) -> None:
    models = {"slow": EMBED["embed"]}
    settings = {"worker": False, "files": str(tmp_path / "files"), "worker_grace_s": 3600}
    environment = {"BATCHERY_MODELS": json.dumps(models), "BATCHERY_GATEWAY": json.dumps(settings)}
    slow = {"TRACE": str(tmp_path / "trace"), "PAUSE_S": "0.5"}
    start_worker("apps.slow_vectors", "-Q", "slow", env=slow)
    start_worker(
        "batchery.app",
        *("-I", "batchery_producer.gateway.jobs", "-Q", "batchery.gateway"),
        *("-P", "threads", "-c", "4"),
        env=environment,
    )
    gateway = start_gateway(models=models, gateway=settings)
    rows: list[dict[str, Any]] = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "slow", "input": f"text {number}"},
        }
        for number in range(ROWS)
    ]
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    sent: Any = {"files": {"file": ("in.jsonl", lines)}, "data": {"purpose": "batch"}}
    file = gateway.request("POST", "/v1/files", **sent).json()
    body = {"endpoint": "/v1/embeddings", "completion_window": "24h", "input_file_id": file["id"]}
    batch = gateway.post("/v1/batches", body).json()

    def is_over() -> Any:
        found = gateway.get(f"/v1/batches/{batch['id']}").json()
        return found if found["status"] in ("completed", "failed", "expired") else None

    over = wait_for(is_over, "the batch to be over", 120)
    assert (over["status"], over["request_counts"]["completed"]) == ("completed", ROWS), over
    output = gateway.get(f"/v1/files/{over['output_file_id']}/content").text.splitlines()
    answers = [json.loads(line)["custom_id"] for line in output]
    assert sorted(answers) == sorted(row["custom_id"] for row in rows)
