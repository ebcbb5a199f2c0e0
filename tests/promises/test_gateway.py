"""The gateway in front of a real worker: OpenAI's embeddings, keys, limits, and what goes wrong."""

import base64
import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from celery import Celery

from batchery_producer.gateway.callers import make_key
from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker, open_redis, queue_length, unsettled, wait_for
from support.patience import patient

DIMENSIONS = 384

JOB_TIMEOUT_S = patient(60)

KEY, HASH = make_key()
SMALL_KEY, SMALL_HASH = make_key()

KEYS = {
    "shop": {"hash": HASH, "class": "high"},
    "small": {"hash": SMALL_HASH, "tenant": "acme", "max_items": 2, "max_chars": 20},
}


@pytest.fixture(scope="module")
def model_worker(start_module_worker: StartWorker) -> Worker:
    """Serves the embedding model."""
    models = {"embed": {**EMBED["embed"], "aliases": ["text-embedding-3-small"]}}
    return start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, model_worker: Worker) -> GatewayProcess:
    """Serves anybody on this machine."""
    models = {"embed": {**EMBED["embed"], "aliases": ["text-embedding-3-small"]}}
    return start_gateway(models=models)


@pytest.fixture(scope="module")
def keyed(start_gateway: StartGateway, model_worker: Worker) -> GatewayProcess:
    """Serves those who have a key."""
    return start_gateway(gateway={"keys": KEYS, "max_body_bytes": 100_000})


@pytest.fixture
def openai_client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, as it comes."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(gateway: GatewayProcess, body: Any, key: str = "", **headers: str) -> httpx2.Response:
    if key:
        headers["authorization"] = f"Bearer {key}"
    return gateway.post("/v1/embeddings", body, headers=headers)


def test_openai_client_gets_vectors_in_the_order_of_its_texts(openai_client: openai.OpenAI) -> None:
    texts = [f"text number {number} " * (number % 7 + 1) for number in range(50)]
    # The client asks for base64 by itself, and unpacks it.
    many = openai_client.embeddings.create(model="text-embedding-3-small", input=texts)
    assert [each.index for each in many.data] == list(range(50))
    assert many.model == "embed"
    one = openai_client.embeddings.create(model="embed", input=texts[17], encoding_format="float")
    assert one.data[0].embedding == pytest.approx(many.data[17].embedding, abs=1e-5)
    assert len(one.data[0].embedding) == DIMENSIONS
    assert many.usage.total_tokens > one.usage.total_tokens > 0
    short = openai_client.embeddings.create(model="embed", input=texts[17], dimensions=8)
    assert len(short.data[0].embedding) == 8
    assert sum(each**2 for each in short.data[0].embedding) == pytest.approx(1, abs=1e-4)


def test_requests_of_all_dimensions_share_a_batch(
    gateway: GatewayProcess, client: Celery, redis_url: str
) -> None:
    """Only jobs with equal keywords do."""
    client.control.cancel_consumer("embed", reply=True, timeout=JOB_TIMEOUT_S, limit=1)
    body = {"model": "embed", "input": "one text"}
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(post, gateway, {**body, "dimensions": each}) for each in (8, 9)]
        try:
            wait_for(lambda: queue_length(redis_url, "embed") == 2, "both wait", JOB_TIMEOUT_S)
            with open_redis(redis_url) as bare:
                messages = [json.loads(each) for each in bare.lrange("embed", 0, -1)]
        finally:
            client.control.add_consumer("embed", reply=True, timeout=JOB_TIMEOUT_S, limit=1)
        vectors = [each.result().json()["data"][0]["embedding"] for each in calls]
    one, other = (json.loads(base64.b64decode(each["body"]))[1] for each in messages)
    assert one == other
    for vector in vectors:
        keywords = {"dimensions": len(vector)}
        job = client.send_task("embed", [body["input"]], keywords, queue="embed")
        assert vector == pytest.approx(job.get(timeout=JOB_TIMEOUT_S)["vector"], abs=1e-5)


def test_openai_client_lists_models(openai_client: openai.OpenAI) -> None:
    # Whoever looks for the name that it uses finds it: an alias is as good as a name.
    ids = ["embed", "text-embedding-3-small"]
    assert [model.id for model in openai_client.models.list()] == ids
    assert [openai_client.models.retrieve(each).id for each in ids] == ids
    with pytest.raises(openai.NotFoundError, match="there are: embed"):
        openai_client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"input": "a", "model": "gpt-9"}, 404, "'gpt-9'"),
        ({"input": ["a", ""], "model": "embed"}, 400, "item 1 of input"),
        ({"input": "a", "model": "embed", "dimensions": 1000}, 400, "dimensions = 1000"),
        ({"input": ["a"] * 3000, "model": "embed"}, 413, "max_items = 2048"),
        ({"model": "embed"}, 400, "input"),
        (["a"], 400, "no object of JSON"),
    ],
)
def test_bad_request_says_what_is_wrong(
    gateway: GatewayProcess, body: Any, status: int, named: str
) -> None:
    answer = post(gateway, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_of_another_type_is_told_which_header_is_missing(gateway: GatewayProcess) -> None:
    body = json.dumps({"model": "embed", "input": "x"}).encode()
    # As `curl -d` sends it.
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = gateway.post("/v1/embeddings", content=body, headers=form)
    assert answer.status_code == 415
    assert "'Content-Type: application/json'" in answer.json()["error"]["message"]
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = gateway.post("/v1/embeddings", content=gzip.compress(body), headers=packed)
    assert answer.status_code == 400
    assert "the body is no JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/info", "/status", "/v1/models", "/metrics"])
def test_head_answers_wherever_get_does(gateway: GatewayProcess, path: str) -> None:
    answer = gateway.request("HEAD", path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers.get("content-type") == gateway.get(path).headers.get("content-type")


def test_unknown_routes_and_methods(gateway: GatewayProcess) -> None:
    assert gateway.get("/v1/nothing").status_code == 404
    answer = gateway.get("/v1/embeddings")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_slash_too_many_leads_nobody_to_an_address_without_tls(gateway: GatewayProcess) -> None:
    # Behind a proxy with TLS, `http://` and the host are not where the caller came from.
    for method, path in (("POST", "/v1/embeddings/"), ("GET", "/health/")):
        answer = gateway.request(method, path)
        assert (answer.status_code, "location" in answer.headers) == (404, False)
        assert f"{method} {path}: no such route" in answer.text


def test_a_key_is_needed_where_there_are_keys(keyed: GatewayProcess) -> None:
    body = {"input": "a"}
    for key in ("", "sk-batchery-wrong"):
        answer = post(keyed, body, key)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/metrics", "/status", "/v1/models", "/v1/files", "/v1/batches", "/batch-stats"):
        assert keyed.get(path).status_code == 401
    assert post(keyed, body, KEY).status_code == 200
    # A probe has none.
    assert keyed.get("/health").status_code == 200


def test_limits_of_a_key(keyed: GatewayProcess) -> None:
    assert post(keyed, {"input": ["a", "b"]}, SMALL_KEY).status_code == 200
    many = post(keyed, {"input": ["a", "b", "c"]}, SMALL_KEY)
    assert (many.status_code, "max_items = 2" in many.text) == (413, True)
    long = post(keyed, {"input": "a" * 21}, SMALL_KEY)
    assert (long.status_code, "max_chars = 20" in long.text) == (413, True)
    assert post(keyed, {"input": ["a", "b", "c"]}, KEY).status_code == 200


def test_body_that_is_too_large_is_refused_unread(keyed: GatewayProcess) -> None:
    assert post(keyed, {"input": "a" * 200_000}, KEY).status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    answer = keyed.post(
        "/v1/embeddings", content=chunks(), headers={"authorization": f"Bearer {KEY}"}
    )
    assert answer.status_code == 413


def test_late_result_is_logged_with_its_request_id(gateway: GatewayProcess) -> None:
    # Shorter than any way to the worker and back.
    headers = {"x-request-id": "order-8", "x-request-timeout": "0.0001"}
    answer = gateway.post("/v1/embeddings", {"input": "a"}, headers=headers)
    assert answer.status_code == 504
    assert answer.headers["x-request-id"] == "order-8"
    assert "within 0.0001 s" in answer.json()["error"]["message"]
    line = "request order-8: POST '/v1/embeddings': timeout: "
    wait_for(lambda: line in gateway.log, "it is logged")
    assert post(gateway, {"input": "a"}, **{"x-request-timeout": "soon"}).status_code == 400


def test_web_page_with_a_name_for_loopback_is_refused(gateway: GatewayProcess) -> None:
    assert post(gateway, {"input": "a"}, host="evil.example").status_code == 403


def test_full_queue_says_when_to_come_again(start_gateway: StartGateway, redis_url: str) -> None:
    """And so for all tenants."""
    limited = {"high": {"level": 0, "share": 1, "max_waiting": 1}}
    gateway = start_gateway(
        models={"idle": {**EMBED["embed"], "queue": "full"}},
        gateway={"timeout_s": patient(60), "keys": KEYS},
        environment={"BATCHERY_CLASSES": json.dumps(limited)},
    )
    # It waits in the queue, as nobody serves it.
    key = f"Authorization: Bearer {SMALL_KEY}"
    with gateway.sent("/v1/embeddings", {"input": "a"}, key), ThreadPoolExecutor(3) as pool:
        wait_for(lambda: queue_length(redis_url, "full") == 1, "one waits")
        keys = (KEY, KEY, SMALL_KEY)
        refused = list(pool.map(lambda key: post(gateway, {"input": "a"}, key), keys))
    for each in refused:
        assert each.status_code == 429
        assert int(each.headers["retry-after"]) >= 1
        assert each.json()["error"]["type"] == "rate_limit_exceeded"


def test_caller_who_hangs_up_frees_the_jobs(
    start_gateway: StartGateway, model_worker: Worker, client: Celery, redis_url: str, store: Any
) -> None:
    # The worker hears who gives up, and takes from this queue later.
    gateway = start_gateway(models={"embed": {**EMBED["embed"], "queue": "later"}})
    with gateway.sent("/v1/embeddings", {"input": ["a", "b"]}):
        wait_for(lambda: queue_length(redis_url, "later") == 1, "it is sent")
        gone = json.loads(store.lindex("later", 0))["headers"]["id"]
    wait_for(lambda: f"flagged as revoked: {gone}" in model_worker.log, "it is revoked")
    client.control.add_consumer("later", destination=[model_worker.name])
    wait_for(lambda: queue_length(redis_url, "later") + unsettled(redis_url) == 0, "jobs gone")
    assert f"Task embed[{gone}] succeeded" not in model_worker.log


@pytest.mark.parametrize("processes", ["1", "2"])
def test_tasks_that_cannot_be_imported_are_a_line_and_exit_code_2(
    redis_url: str, tmp_path: Path, processes: str
) -> None:
    (tmp_path / "torn_shop.py").write_text(
        "from celery import Celery\n"
        "from batchery import install\n"
        "app = install(Celery('torn_shop', include=['no_such_module']))\n"
    )
    gateway = GatewayProcess(
        tmp_path,
        redis_url,
        *("-A", "torn_shop", "--processes", processes),
        models={},
        gateway={"worker": True},
        environment={"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url},
    )
    try:
        assert gateway.process.wait(patient(60)) == 2, gateway.log
    finally:
        gateway.kill()
    assert "its tasks cannot be imported: ModuleNotFoundError: No module" in gateway.log
    assert "Traceback" not in gateway.log
