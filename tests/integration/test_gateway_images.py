"""Pictures over HTTP, as clients of infinity and Jina send them, before a real worker."""

import base64
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from batchery import Client, to_numpy
from batchery_producer.gateway.callers import make_key
from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker
from support.patience import patient
from support.pictures import draw, encode, save_vision_model

Models = dict[str, dict[str, Any]]

KEY, HASH = make_key()

PICTURE, OTHER = encode(draw(64, 48)), encode(draw(40, 90, seed=3), "JPEG")


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(data)}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    kinds = {"look": ("image_embedding", "clip"), "sort": ("image_classification", "vit-labels")}
    found: Models = {"embed": EMBED["embed"]}
    for name, (kind, architecture) in kinds.items():
        save_vision_model(folder / name, architecture)
        found[name] = {"kind": kind, "model": str(folder / name)}
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A web site with a picture, at an address that the worker may ask."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "cat.png").write_bytes(PICTURE)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose pictures workers may read, if one who is trusted names them."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "cat.png").write_bytes(PICTURE)
    return folder


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, models: Models, root: Path) -> Worker:
    media = {"hosts": ["127.0.0.1"], "roots": [str(root)], "timeout_s": patient(60)}
    env = {"BATCHERY_MODELS": json.dumps(models), "BATCHERY_MEDIA": json.dumps(media)}
    return start_module_worker("batchery.app", env=env)


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, worker: Worker, models: Models) -> GatewayProcess:
    return start_gateway(models=models)


@pytest.fixture(scope="module")
def vectors(redis_url: str, worker: Worker) -> dict[str, list[float]]:
    """What a Celery client gets, by what it sent."""
    items = {"picture": PICTURE, "other": OTHER, "text": {"text": "a cat"}}
    with Client(redis_url) as client:
        look = client.task("look")
        return {
            name: look.delay(item).get(timeout=patient(60))["vector"]
            for name, item in items.items()
        }


def embed(gateway: GatewayProcess, **body: Any) -> Any:
    answer = gateway.post("/v1/embeddings", {"model": "look", **body})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def close(vector: list[float]) -> Any:
    return pytest.approx(vector, abs=1e-5)


def test_infinity_says_by_modality_what_its_strings_are(
    gateway: GatewayProcess, site: str, vectors: dict[str, list[float]]
) -> None:
    urls = [f"{site}/cat.png", data_url(OTHER, "image/jpeg")]
    found = embed(gateway, input=urls, modality="image")
    assert found == [close(vectors["picture"]), close(vectors["other"])]
    packed = embed(gateway, input=urls[0], modality="image", encoding_format="base64")
    assert to_numpy(packed[0]).tolist() == close(vectors["picture"])
    assert embed(gateway, input=["a cat"], modality="text") == [close(vectors["text"])]


def test_jina_has_objects_of_pictures_and_texts(
    gateway: GatewayProcess, site: str, vectors: dict[str, list[float]]
) -> None:
    given = [
        {"text": "a cat"},
        {"image": f"{site}/cat.png"},
        {"image": in_base64(OTHER)},
        {"image": data_url(PICTURE)},
        "a cat",
    ]
    names = ("text", "picture", "other", "picture", "text")
    assert embed(gateway, input=given) == [close(vectors[name]) for name in names]


def test_openai_client_has_texts_in_the_space_of_pictures(
    gateway: GatewayProcess, vectors: dict[str, list[float]]
) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api:
        found = api.embeddings.create(model="look", input="a cat", dimensions=8)
        assert len(found.data[0].embedding) == 8
        assert found.usage.total_tokens > 0
        extra = {"modality": "image"}
        found = api.embeddings.create(model="look", input=data_url(PICTURE), extra_body=extra)
    assert found.data[0].embedding == close(vectors["picture"])


def test_the_first_model_of_pictures_is_found_by_what_is_sent(gateway: GatewayProcess) -> None:
    answer = gateway.post("/v1/embeddings", {"input": [{"image": data_url(PICTURE)}]})
    assert answer.json()["model"] == "look"
    answer = gateway.post("/v1/embeddings", {"input": [{"text": "a cat"}]})
    assert answer.json()["model"] == "embed"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"input": [{"image": data_url(PICTURE)}], "model": "embed"}, 404, "of kind embedding"),
        ({"input": [{"audio": data_url(PICTURE)}]}, 404, "not audio_embedding"),
        ({"input": [[1, 2]]}, 400, "must be bytes, base64, a URL"),
        ({"input": [{"image": "x", "text": "y"}]}, 400, "media (see item 0)"),
        ({"input": [{"picture": "x"}]}, 400, "media (see item 0)"),
        ({"input": [{"image": ""}]}, 400, "image: is empty"),
        ({"input": [{"image": in_base64(b"no picture")}]}, 400, "is no picture"),
        ({"input": [{"image": in_base64(PICTURE[:60])}]}, 400, "image: "),
        ({"input": [{"image": "http://shop.example/a.png"}]}, 400, "'shop.example' is not allowed"),
        ({"input": [{"image": "file:///etc/passwd"}]}, 400, "is no URL of a host"),
        ({"input": "x", "modality": "video"}, 400, "modality"),
    ],
)
def test_bad_request_says_what_is_wrong(
    gateway: GatewayProcess, body: Any, status: int, named: str
) -> None:
    answer = gateway.post("/v1/embeddings", {"model": "look", **body})
    assert (answer.status_code, named in answer.text) == (status, True), answer.text


def test_a_bad_picture_does_not_harm_the_next_request(
    gateway: GatewayProcess, vectors: dict[str, list[float]]
) -> None:
    given = [{"image": in_base64(PICTURE)}, {"image": in_base64(b"no picture")}]
    answer = gateway.post("/v1/embeddings", {"model": "look", "input": given})
    assert "item 1: image: is no picture" in answer.json()["error"]["message"]
    assert embed(gateway, input=given[:1]) == [close(vectors["picture"])]


def test_no_caller_names_files_of_a_worker_or_what_others_have_put_into_redis(
    gateway: GatewayProcess, root: Path, redis_url: str
) -> None:
    path = str(root / "cat.png")
    with Client(redis_url) as client:
        # One who may push into the queue may.
        assert client.task("look").delay(path).get(timeout=patient(60))["vector"]
    for place in (path, "batchery:abc"):
        for body in ({"input": place, "modality": "image"}, {"input": [{"image": place}]}):
            answer = gateway.post("/v1/embeddings", {"model": "look", **body})
            assert answer.status_code == 400
            assert "image: is not base64" in answer.text
        for item in (place, {"image": place}):
            answer = gateway.post("/page/try", {"model": "look", "item": item})
            assert (answer.status_code, "is not base64" in answer.text) == (422, True)


def test_the_page_tries_a_picture(gateway: GatewayProcess) -> None:
    body = {"model": "sort", "item": data_url(PICTURE), "keywords": {"top_k": 5}}
    answer = gateway.post("/page/try", body).raise_for_status().json()
    assert answer["kind"] == "image_classification"
    assert set(answer["result"]["scores"]) == {"cat", "dog", "bird"}


def test_bytes_of_pictures_are_not_characters_of_texts(
    start_gateway: StartGateway, worker: Worker, models: Models
) -> None:
    keys = {"shop": {"hash": HASH, "max_chars": 100}}
    keyed = start_gateway(models=models, gateway={"keys": keys})
    headers = {"authorization": f"Bearer {KEY}"}
    for item, status in (({"image": in_base64(PICTURE)}, 200), ({"text": "x" * 101}, 413)):
        answer = keyed.post("/v1/embeddings", {"model": "look", "input": [item]}, headers=headers)
        assert answer.status_code == status, answer.text
