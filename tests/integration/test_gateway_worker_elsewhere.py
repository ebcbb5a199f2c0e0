"""The gateway's jobs, run by a worker that was started by hand, as docs/gateway.md has it."""

import json
from pathlib import Path

from conftest import StartGateway, StartWorker
from support.gateway import EMBED
from support.openai_files import begin, client_of, counts, end_of, lines_of, request
from support.patience import patient

#: Enough for several steps.
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
    with client_of(gateway) as api:
        rows = [request(f"r-{n}", f"text {n}", "slow") for n in range(ROWS)]
        batch = end_of(api, begin(api, rows).id, patient(120))
        assert (batch.status, counts(batch)) == ("completed", (ROWS, ROWS, 0))
        lines = lines_of(api, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
