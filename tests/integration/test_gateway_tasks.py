"""Tasks of an allow list over HTTP, with a real worker: now, later, revoked, posted, repeated."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from celery import Celery
from standardwebhooks import Webhook

from batchery_producer.gateway.callers import make_key, make_webhook_secret
from conftest import StartGateway
from support.gateway import GatewayProcess
from support.harness import Worker, messages_in, queue_length, unsettled, wait_for
from support.patience import patient
from support.webhook_receiver import WebhookReceiver

KEY, HASH = make_key()
OTHER_KEY, OTHER_HASH = make_key()
SECRET = make_webhook_secret()

#: Where the jobs of a batch task without a route wait.
QUEUE = "apps.shop.shout"

SETTINGS = {
    "tasks": ["apps.shop.*", "apps.nobody.task"],
    "webhook_hosts": ["127.0.0.1"],
    "keys": {
        "shop": {"hash": HASH, "webhook_secret": SECRET},
        "other": {"hash": OTHER_HASH, "max_items": 2},
    },
    "timeout_s": patient(30),
    "worker": True,
}


@pytest.fixture(scope="module")
def start_shop(start_gateway: StartGateway, worker: Worker, redis_url: str) -> Any:
    """Starts gateways of the worker's app."""

    def start(**settings: Any) -> GatewayProcess:
        return start_gateway(
            "-A",
            "apps.shop",
            models={},
            gateway={**SETTINGS, **settings},
            environment={"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url},
        )

    return start


@pytest.fixture(scope="module")
def gateway(start_shop: Any) -> GatewayProcess:
    """Serves two callers."""
    gateway: GatewayProcess = start_shop()
    return gateway


def call(
    gateway: GatewayProcess,
    method: str,
    path: str,
    body: Any = None,
    key: str = KEY,
    **headers: str,
) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}", **headers}
    return gateway.request(method, path, json=body, headers=headers)


def post(gateway: GatewayProcess, task: str, **body: Any) -> httpx2.Response:
    return call(gateway, "POST", f"/tasks/apps.shop.{task}", body)


def later(gateway: GatewayProcess, task: str, **body: Any) -> str:
    """Sends a task without waiting for it; returns its path."""
    answer = post(gateway, task, wait_s=0, **body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["status"] == "PENDING"
    assert answer.headers["location"] == f"/tasks/{answer.json()['id']}"
    return answer.headers["location"]


def test_item_of_a_batch_task_is_answered_now(gateway: GatewayProcess) -> None:
    answer = post(gateway, "read_batch", item={"a": [1]}, keywords={"tag": "x"})
    assert answer.status_code == 200
    state = answer.json()
    assert (state["task"], state["status"]) == ("apps.shop.read_batch", "SUCCESS")
    assert (state["result"]["item"], state["result"]["tag"]) == ({"a": [1]}, "x")
    # Null is an item as well.
    assert post(gateway, "read_batch", item=None).json()["result"]["item"] is None


def test_items_have_results_of_their_own(gateway: GatewayProcess) -> None:
    items = [{"answer": "value", "value": 1}, {"answer": "failed", "why": "no stock"}]
    state = post(gateway, "moody", items=items).json()
    assert state["status"] == "SUCCESS"
    assert state["results"] == [
        {"ok": 1},
        {"error": {"type": "ItemFailed", "message": "no stock"}},
    ]


@pytest.mark.parametrize(
    ("task", "body", "kind", "text"),
    [
        ("nasty", {"item": "raise"}, "KeyError", "a bad one"),
        ("moody", {"item": {"answer": "failed", "why": "no stock"}}, "ItemFailed", "no stock"),
        ("moody", {"item": {"answer": "object"}}, "UnserialisableResult", "object"),
    ],
)
def test_error_of_a_task_is_its_type_and_message(
    gateway: GatewayProcess, task: str, body: dict[str, Any], kind: str, text: str
) -> None:
    answer = post(gateway, task, **body)
    assert answer.status_code == 200
    state = answer.json()
    assert (state["status"], state["error"]["type"]) == ("FAILURE", kind)
    assert text in state["error"]["message"]
    assert "Traceback" not in answer.text


def test_result_that_is_no_json_is_an_error(
    gateway: GatewayProcess, client: Celery, store: Any
) -> None:
    path = later(gateway, "nap", item=0.05)
    call(gateway, "GET", f"{path}?wait_s=20")
    backend: Any = client.backend
    name = backend.get_key_for_task(path.rsplit("/", 1)[1])
    for stored in (
        b"\x80\x04K*.",
        b'{"status": "SUCCESS", "result": {"__type__": "decimal",',
        b'{"status": "SUCCESS", "result": [1, NaN, Infinity]}',
    ):
        store.set(name, stored)
        state = call(gateway, "GET", path).json()
        assert (state["status"], state["error"]["type"]) == ("FAILURE", "UnserialisableResult")
        assert "no JSON" in state["error"]["message"]


@pytest.mark.parametrize(
    ("task", "body", "status", "text"),
    [
        ("apps.other.task", {"item": 1}, 404, "gateway.tasks"),
        ("apps.shop.shout%00", {"item": 1}, 404, "the app has no such task"),
        ("celery.backend_cleanup", {"item": 1}, 404, "gateway.tasks"),
        ("apps.shop.shout", {"item": 1, "items": [1]}, 422, "expected item or items"),
        ("apps.shop.shout", {"item": 1, "args": [1]}, 422, "args: "),
        ("apps.shop.shout", {"keywords": {}}, 422, "expected item or items"),
        ("apps.shop.shout", {"items": []}, 422, "items: "),
        ("apps.shop.shout", {"item": "a", "wait_s": -1}, 422, "wait_s: "),
        ("apps.shop.shout", {"item": "a", "when": "now"}, 422, "when: "),
        ("apps.shop.double", {"item": 1}, 422, "is no batch task"),
        ("apps.shop.shout", {"item": 1, "keywords": {"no": 1}}, 422, "apps.shop.shout: "),
        ("apps.shop.shout", {"items": ["a"] * 2049}, 413, "max_items = 2048"),
        ("apps.shop.shout", {"item": 2**64}, 422, "cannot be sent: Integer exceeds 64-bit"),
        ("apps.shop.shout", {"item": 1, "webhook": "http://10.0.0.1/"}, 422, "not allowed"),
    ],
)
def test_bad_request_says_what_is_wrong(
    gateway: GatewayProcess, task: str, body: Any, status: int, text: str
) -> None:
    answer = call(gateway, "POST", f"/tasks/{task}", body)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["detail"]


def test_id_of_another_key_is_unknown(gateway: GatewayProcess) -> None:
    path = later(gateway, "shout", item="a")
    for method in ("GET", "DELETE"):
        for wrong, key in ((path, OTHER_KEY), (f"/tasks/{'0' * 8}-0000-4000-8000-{'0' * 12}", KEY)):
            answer = call(gateway, method, wrong, key=key)
            assert answer.status_code == 404
            assert "no task of yours has this id, or its result has expired" in answer.text
    assert call(gateway, "GET", "/tasks/nonsense").status_code == 404
    assert call(gateway, "GET", path).status_code == 200
    assert call(gateway, "GET", path, key="sk-batchery-wrong").status_code == 401
    # Its limits are its own, too.
    body = {"items": ["a", "b", "c"]}
    answer = call(gateway, "POST", "/tasks/apps.shop.shout", body, key=OTHER_KEY)
    assert (answer.status_code, "max_items = 2" in answer.text) == (413, True)


def test_task_of_a_module_that_the_app_includes_goes_to_its_queue(
    start_gateway: StartGateway, redis_url: str
) -> None:
    including = start_gateway(
        "-A",
        "apps.including",
        gateway={"tasks": ["*"]},
        environment={"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url},
    )
    body = {"item": "A", "wait_s": 0}
    assert call(including, "POST", "/tasks/apps.included.whisper", body).status_code == 202
    assert queue_length(redis_url, "included") == 1
    # Those of Celery itself and of the gateway are none of items.
    for name in ("celery.backend_cleanup", "batchery.gateway.webhook"):
        refused = call(including, "POST", f"/tasks/{name}", body)
        assert (refused.status_code, "is no batch task" in refused.text) == (422, True)


@pytest.fixture
def kept(client: Celery, worker: Worker, redis_url: str) -> Iterator[None]:
    """Tasks wait in their queue, and are taken when the test ends."""
    wait_for(lambda: queue_length(redis_url, QUEUE) + unsettled(redis_url) == 0, "nothing waits")
    client.control.cancel_consumer(QUEUE, destination=[worker.name])
    wait_for(
        lambda: QUEUE not in {each["name"] for each in worker.inspect(client, "active_queues")},
        "the queue is left alone",
    )
    yield
    take(client, worker)


def take(client: Celery, worker: Worker) -> None:
    """Has the worker take what was kept."""
    client.control.add_consumer(QUEUE, destination=[worker.name], reply=True)


def test_result_that_comes_later_is_waited_for(
    gateway: GatewayProcess, kept: None, worker: Worker, client: Celery
) -> None:
    answer = post(gateway, "shout", item="a", wait_s=0.1)
    assert answer.status_code == 202
    path = answer.headers["location"]
    assert call(gateway, "GET", f"{path}?wait_s=0.1").json()["status"] == "PENDING"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(call, gateway, "GET", f"{path}?wait_s=30") for _ in range(2)]
        take(client, worker)
        first, second = (each.result().json() for each in waiting)
    assert (first["status"], first["result"], second) == ("SUCCESS", "A", first)
    # It is still there, and not revoked any more.
    for method in ("DELETE", "GET"):
        assert call(gateway, method, path).json() == first


def test_revoked_task_does_not_run(
    gateway: GatewayProcess, kept: None, worker: Worker, client: Celery, redis_url: str
) -> None:
    path = later(gateway, "shout", item="never")
    task_id = path.rsplit("/", 1)[1]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, gateway, "GET", f"{path}?wait_s=20")
        revoked = call(gateway, "DELETE", path)
        assert (revoked.status_code, revoked.json()["status"]) == (200, "REVOKED")
        assert revoked.json()["error"]["type"] == "TaskRevokedError"
        wait_for(lambda: f"flagged as revoked: {task_id}" in worker.log, "the worker knows")
        take(client, worker)
        assert waiting.result().json()["status"] == "REVOKED"
    wait_for(lambda: queue_length(redis_url, QUEUE) + unsettled(redis_url) == 0, "it is gone")
    assert f"[{task_id}] succeeded" not in worker.log
    # Once more changes nothing.
    assert call(gateway, "DELETE", path).json()["status"] == "REVOKED"


def test_caller_who_hangs_up_frees_the_task(
    gateway: GatewayProcess, kept: None, worker: Worker, store: Any, redis_url: str
) -> None:
    with gateway.sent("/tasks/apps.shop.shout", {"item": "a"}, f"Authorization: Bearer {KEY}"):
        wait_for(lambda: queue_length(redis_url, QUEUE) == 1, "it is sent")
        (message,) = messages_in(store, QUEUE)
        task_id = json.loads(message)["headers"]["id"]
    wait_for(lambda: f"flagged as revoked: {task_id}" in worker.log, "it is revoked")


def test_task_that_outlasts_its_gateway_is_told_by_its_id(
    gateway: GatewayProcess,
    start_shop: Any,
    kept: None,
    worker: Worker,
    client: Celery,
    redis_url: str,
) -> None:
    stopped = start_shop(timeout_s=300)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, stopped, "shout", item="a")
        wait_for(lambda: queue_length(redis_url, QUEUE) == 1, "it is sent")
        stopped.process.send_signal(signal.SIGTERM)
        # Not that it should be sent again: it would run twice.
        answer = waiting.result()
    assert (answer.status_code, answer.json()["status"]) == (202, "PENDING")
    take(client, worker)
    path = answer.headers["location"]
    assert call(gateway, "GET", f"{path}?wait_s=30").json()["status"] == "SUCCESS"


def check_signed(headers: Any, body: bytes, task_id: str) -> None:
    assert headers["webhook-id"] == task_id
    Webhook(SECRET).verify(body, headers)


def test_webhook_gets_the_result_signed_and_again_until_it_takes_it(
    gateway: GatewayProcess,
) -> None:
    with WebhookReceiver(500, 302, 204) as receiver:
        path = later(gateway, "shout", item="hello", webhook=f"{receiver.url}/done?a=b")
        wait_for(lambda: len(receiver.received) == 3, "third attempt")
    state = call(gateway, "GET", path).json()
    for received in receiver.received:
        assert received.path == "/done?a=b"
        assert json.loads(received.body) == state
        check_signed(received.headers, received.body, state["id"])
    assert state["result"] == "HELLO"


def test_webhook_of_a_key_without_a_secret_is_refused(gateway: GatewayProcess) -> None:
    body = {"item": "a", "wait_s": 0, "webhook": "http://127.0.0.1:9/"}
    answer = call(gateway, "POST", "/tasks/apps.shop.shout", body, key=OTHER_KEY)
    assert (answer.status_code, "webhook_secret" in answer.json()["detail"]) == (422, True)


def test_webhook_of_a_failed_task_tells_its_error(gateway: GatewayProcess) -> None:
    with WebhookReceiver() as receiver:
        later(gateway, "nasty", item="raise", webhook=receiver.url)
        (received,) = wait_for(lambda: receiver.received, "a webhook")
    state = json.loads(received.body)
    assert (state["status"], state["error"]["type"]) == ("FAILURE", "KeyError")


def test_receiver_that_is_gone_is_not_asked_again(gateway: GatewayProcess) -> None:
    with WebhookReceiver(410) as receiver:
        later(gateway, "shout", item="a", webhook=receiver.url)
        wait_for(lambda: receiver.received, "a webhook")
        # Its second attempt would have come before that of another one.
        with WebhookReceiver(500, 200) as other:
            later(gateway, "shout", item="b", webhook=other.url)
            wait_for(lambda: len(other.received) == 2, "another one's second attempt")
    assert len(receiver.received) == 1


def test_webhook_of_a_revoked_task_is_not_posted(
    gateway: GatewayProcess, kept: None, client: Celery, worker: Worker
) -> None:
    with WebhookReceiver() as receiver:
        path = later(gateway, "shout", item="never", webhook=f"{receiver.url}/never")
        call(gateway, "DELETE", path)
        take(client, worker)
        later(gateway, "shout", item="after it", webhook=f"{receiver.url}/after")
        wait_for(lambda: receiver.received, "a webhook")
    assert [each.path for each in receiver.received] == ["/after"]
