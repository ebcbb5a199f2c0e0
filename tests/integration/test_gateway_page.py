"""The gateway's page in a real Chromium, and the figures behind it, while real jobs run."""

import itertools
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import batchery_producer.gateway
from batchery.errors import InvalidItem
from batchery.protocol.headers import sent_now
from batchery_producer.gateway.callers import make_key
from conftest import StartGateway, StartWorker
from support.browser import DESK, PHONE, Browser
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker, wait_for
from support.own_redis import OwnRedis
from support.patience import patient
from support.tiny_models import save_model

KEY, HASH = make_key()

PAGE = Path(batchery_producer.gateway.__file__).parent / "page"

#: A label that would be bold, if it were read as HTML.
BOLD = "<b>good</b>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mood")
    save_model(folder, "bert", labels=("bad", BOLD))
    pairs = tmp_path_factory.mktemp("fits")
    save_model(pairs, "bert", labels=("fits",))
    save_model(few := tmp_path_factory.mktemp("few"), "bert", head="MaskedLM")
    save_model(many := tmp_path_factory.mktemp("many"), "bert")
    return {
        "embed": {**EMBED["embed"], "aliases": ["text-embedding-3-small"]},
        "few": {"kind": "sparse_embedding", "model": str(few)},
        "many": {"kind": "multi_vector_embedding", "model": str(many)},
        "mood": {"kind": "classification", "model": str(folder)},
        "fits": {"kind": "rerank", "model": str(pairs)},
    }


@pytest.fixture(scope="module")
def model_worker(start_module_worker: StartWorker, models: dict[str, Any]) -> Worker:
    return start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})


@pytest.fixture(scope="module")
def gateway(
    start_gateway: StartGateway, model_worker: Worker, models: dict[str, Any]
) -> GatewayProcess:
    return start_gateway(models=models, gateway={"worker": True})


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Iterator[Browser]:
    """The page of the gateway, at a desk."""
    browser.looks(DESK)
    with browser.visits(gateway.url):
        yield browser


@contextmanager
def load(client: Celery) -> Iterator[None]:
    """Sends texts of many lengths for as long as it lasts."""
    done = threading.Event()

    def send() -> None:
        with client.connection_for_write() as connection, client.amqp.Producer(connection) as to:
            for number in itertools.count():
                client.send_task(
                    "embed",
                    ["word " * (1 + 7 * number % 50)],
                    queue="embed",
                    ignore_result=True,
                    headers=sent_now(),
                    producer=to,
                )
                if done.wait(0.05):
                    return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def status_of(gateway: GatewayProcess) -> Any:
    return gateway.get("/status").raise_for_status().json()


def answer(page: Browser) -> str:
    """What the box shows when the model has answered."""

    def shown() -> str:
        text = page.text("answer")
        return "" if "Running" in text else text

    return wait_for(shown, "an answer", patient(60))


def test_figures_change_while_jobs_run(
    page: Browser, gateway: GatewayProcess, model_worker: Worker, client: Celery
) -> None:
    before = page.number("items")
    with load(client):
        wait_for(lambda: page.number("items_per_s") > 0, "a rate")
        wait_for(lambda: page.number("items") > before, "items that ran")
        wait_for(lambda: "since start" in page.text("devices"), "the size of batches")
        wait_for(lambda: page.points("spark_line") >= 2, "a line of rates")
        (device,) = wait_for(
            lambda: [row for row in page.rows("devices") if model_worker.name in row], "the device"
        )
        assert device.startswith(f"cpu {model_worker.name}, ready ")
        assert device.endswith(" MiB main memory")
        # Batch files of other tests have a queue, too.
        queues = {row.split()[0] for row in page.rows("queues")}
        assert {"celery", "embed", "few", "fits", "many", "mood"} <= queues
        assert "tokens/s" in page.text("rates")
    still = lambda: page.number("items_per_s") == 0 == page.number("waiting")  # noqa: E731
    wait_for(still, "quiet", patient(60))

    def told() -> bool:
        items = model_worker.inspect(client, "stats")["pool"]["batches"]["items"]
        is_shown = page.number("items") == items == status_of(gateway)["items"]
        return is_shown and page.text("state") == "1 worker"

    wait_for(told, "the page shows what the worker says")


def test_what_waits_has_an_age_in_redis_and_in_the_worker(
    page: Browser, gateway: GatewayProcess, model_worker: Worker, client: Celery
) -> None:
    def control(command: str) -> None:
        order = partial(getattr(client.control, command), destination=[model_worker.name])
        wait_for(lambda: order("embed", reply=True, timeout=10, limit=1), f"an answer to {command}")

    def waiting() -> Any:
        """The queue, once an earlier job in it is settled."""
        (queue,) = [each for each in status_of(gateway)["queues"] if each["name"] == "embed"]
        return queue if (queue["waiting"], queue["in_workers"]) == (3, 0) else None

    control("cancel_consumer")
    jobs = [client.send_task("embed", ["a"], queue="embed", headers=sent_now()) for _ in range(3)]
    try:
        # The queue is one of the settings' models, so it is shown though nobody consumes it.
        wait_for(
            lambda: any(row.startswith("embed 3 ") for row in page.rows("queues")),
            "three jobs wait",
        )
        assert 0 < wait_for(waiting, "they are counted")["oldest_s"] < patient(60)
        wait_for(lambda: page.number("waiting") == 3, "no other queue has any")
    finally:
        control("add_consumer")
    for job in jobs:
        job.get(timeout=patient(30))
    wait_for(lambda: page.number("waiting") == 0, "none waits")


def test_failures_are_shown_by_reason(
    page: Browser, gateway: GatewayProcess, client: Celery
) -> None:
    before = page.number("failed")
    # A job, and one item of a job with two.
    with pytest.raises(InvalidItem):
        client.send_task("embed", [""], queue="embed").get(timeout=patient(60))
    header = {"batchery": {"v": 1, "n": 2}}
    job = client.send_task("embed", [["good", ""]], queue="embed", headers=header)
    assert [*job.get(timeout=patient(60))[1]] == ["error"]
    # Those of an earlier test may be shown only now.
    wait_for(lambda: page.number("failed") >= before + 2, "two more failures")
    (row,) = wait_for(lambda: [row for row in page.rows("failures") if row != "None."], "a reason")
    reason, count = row.split()
    assert reason == "InvalidItem"
    assert int(count) >= before + 2


def test_embedding_is_tried_by_keyboard_alone(page: Browser) -> None:
    text = page.find_element(By.ID, "item")
    page.type("item", "Some other text")
    text.send_keys(Keys.TAB)
    assert page.switch_to.active_element.get_attribute("id") == "run"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    info, numbers = answer(page).splitlines()
    assert info.startswith("384 numbers, 5 tokens, ")
    assert info.endswith(" ms")
    assert len([float(each) for each in numbers.removesuffix("…").split()]) == 8


def test_classification_shows_labels_and_html_is_text(page: Browser) -> None:
    page.find_element(By.ID, "model").send_keys("mood")
    page.type("item", "<img src=x onerror=alert(1)> the cat")
    page.click("run")
    shown = answer(page)
    assert " tokens, " in shown
    assert BOLD in shown
    assert "bad" in shown
    assert page.find_elements(By.CSS_SELECTOR, "#answer b") == []
    # Nor is an error, which quotes what was sent.
    page.type("item", '{"<img src=x>": 1}')
    page.click("run")
    error = wait_for(lambda: page.find_elements(By.CSS_SELECTOR, "#answer .error"), "the error")
    assert "text" in error[0].text
    assert page.find_elements(By.CSS_SELECTOR, "img") == []


def test_reranking_takes_a_query_beside_the_text(page: Browser) -> None:
    assert not page.find_element(By.ID, "more").is_displayed()
    page.find_element(By.ID, "model").send_keys("fits")
    assert page.text("more_label") == "Query"
    page.type("more", "what sat on the mat")
    page.type("item", "the cat sat on the mat")
    page.click("run")
    info, name, score = answer(page).splitlines()
    assert " tokens, " in info
    assert name == "score"
    assert 0 <= float(score) <= 1


def test_sparse_and_multi_vector_answers_are_short(page: Browser) -> None:
    page.type("item", "the cat sat on the mat " * 20)
    page.find_element(By.ID, "model").send_keys("few")
    page.click("run")
    info, *weights, more = answer(page).splitlines()
    assert " weights, the largest first, " in info
    assert (len(weights), more) == (8, "…")
    values = [float(each.split(": ")[1]) for each in weights]
    assert all(each.startswith("token ") for each in weights)
    assert values == sorted(values, reverse=True)
    page.find_element(By.ID, "model").send_keys("many")
    page.click("run")
    info, *vectors, more = answer(page).splitlines()
    assert " vectors of 32 numbers, " in info
    assert (len(vectors), more) == (8, "…")
    assert {len(each.removesuffix("…").split()) for each in vectors} == {4}


def test_line_of_each_model_can_be_copied_and_works(page: Browser, models: dict[str, Any]) -> None:
    shown = page.find_elements(By.CSS_SELECTOR, "#models .model")
    assert [each.find_element(By.TAG_NAME, "p").text for each in shown] == [
        "embed (embedding), also called text-embedding-3-small",
        "few (sparse_embedding)",
        "many (multi_vector_embedding)",
        "mood (classification)",
        "fits (rerank)",
    ]
    for each in shown:
        line = each.find_element(By.TAG_NAME, "pre").text
        done = subprocess.run(
            ["sh", "-c", f"{line} -sS -w '%{{http_code}}'"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.endswith("200"), (line, done.stdout)
    page.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    button = shown[0].find_element(By.TAG_NAME, "button")
    assert button.accessible_name == "Copy the command for embed"
    button.click()
    wait_for(lambda: button.text == "Copied", "it is copied")
    script = "const done = arguments[0]; navigator.clipboard.readText().then(done)"
    copied = page.execute_async_script(script)
    assert copied == shown[0].find_element(By.TAG_NAME, "pre").text


def test_files_and_batches_are_shown_with_their_progress(
    page: Browser, gateway: GatewayProcess
) -> None:
    def line(number: int, text: str) -> str:
        body = {"model": "embed", "input": text}
        route = {"method": "POST", "url": "/v1/embeddings", "body": body}
        return json.dumps({"custom_id": str(number), **route})

    content = "\n".join(line(number, "" if number == 3 else "a") for number in range(4))
    file = gateway.post(
        "/v1/files",
        files={"file": ("<b>my</b>.jsonl", content.encode())},
        data={"purpose": "batch"},
    ).json()
    batch = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    made = gateway.post("/v1/batches", batch).json()
    # A state, and the numbers that go with it.
    ended = f"<b>my</b>.jsonl {made['id']} completed 100 % 3 of 4, 1 failed"
    wait_for(lambda: ended in page.rows("batches"), "the batch is shown", patient(60))
    size = f"{len(content) / 1024:.1f} KiB"
    assert f"<b>my</b>.jsonl {file['id']} batch {size}" in page.rows("files")
    # Files are asked for at the same time as batches: they may be those before its end.
    wait_for(
        lambda: sum("batch_output" in row for row in page.rows("files")) == 2,
        "its outputs are shown",
    )
    assert page.find_elements(By.CSS_SELECTOR, "#files b, #batches b") == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_page_is_readable(page: Browser, size: tuple[int, int], dark: bool) -> None:
    page.looks(size, dark=dark)
    page.click("run")
    answer(page)
    wide, inside = page.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= inside <= size[0]
    unnamed = "return [...document.querySelectorAll('input, select, textarea')]"
    assert page.execute_script(f"{unnamed}.filter(e => !e.labels.length).length") == 0
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(16, 19, 23)") is dark


def test_key_is_asked_for_and_kept_in_the_tab(
    browser: Browser, start_gateway: StartGateway, models: dict[str, Any], model_worker: Worker
) -> None:
    settings = {"keys": {"shop": {"hash": HASH}}}
    keyed = start_gateway(models=models, gateway=settings)
    for path in ("/status", "/metrics"):
        assert keyed.get(path).status_code == 401
    assert keyed.post("/page/try", json={}).status_code == 401
    browser.looks(PHONE)
    browser.get(keyed.url)
    wait_for(lambda: browser.text("state") == "needs a key", "the page asks for a key")
    browser.type("key", "sk-batchery-wrong" + Keys.ENTER)
    wait_for(lambda: browser.text("login_error") == "This key is not known.", "it is refused")
    assert browser.text("figures") == ""
    browser.type("key", KEY + Keys.ENTER)
    wait_for(lambda: browser.text("state") == "1 worker", "the figures")
    browser.click("run")
    assert " numbers, " in answer(browser)
    browser.refresh()
    wait_for(lambda: browser.text("state") == "1 worker", "it is kept")
    assert browser.execute_script("return localStorage.length + document.cookie.length") == 0
    assert browser.complaints() == []


def test_page_says_who_is_away(browser: Browser, own_redis: OwnRedis, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, own_redis.url).wait_ready()
    try:
        browser.get(gateway.url)
        wait_for(lambda: browser.text("state") == "no worker answers", "no worker")
        assert "No worker answers. Jobs wait in Redis until one starts" in browser.text("notices")
        own_redis.kill()
        wait_for(lambda: browser.text("state") == "Redis is away", "no Redis")
        assert "Redis does not answer, so nothing is known now: " in browser.text("notices")
        assert browser.text("waiting") == "\N{EN DASH}"
        own_redis.start()
        wait_for(lambda: browser.text("state") == "no worker answers", "Redis is back")
        gateway.kill()
        wait_for(lambda: browser.text("state") == "no answer", "no gateway")
        assert "The gateway does not answer" in browser.text("notices")
    finally:
        gateway.kill()
        browser.get("about:blank")
        browser.complaints()


def test_page_is_three_files_that_load_nothing_from_elsewhere(gateway: GatewayProcess) -> None:
    assert {each.name for each in PAGE.iterdir()} == {"index.html", "page.js", "page.css"}
    for path in ("/", "/page/index.html", "/page/page.js", "/page/page.css"):
        answer = gateway.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "://" not in answer.text
        again = gateway.request("HEAD", path)
        assert again.headers["etag"] == answer.headers["etag"]
    script = (PAGE / "page.js").read_text(encoding="utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script
    for name in ("nothing.js", "..%2fapp.py", "%2e%2e/app.py"):
        assert gateway.get(f"/page/{name}").status_code in (401, 404)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model": "gpt-9", "item": "a"}, 404, "no such model"),
        ({"model": "embed", "item": "a", "keywords": {"nothing": 1}}, 422, "nothing"),
        ({"model": "embed", "item": "a", "more": 1}, 422, "more"),
        ({"model": "embed", "item": 2**64}, 422, "cannot be sent: Integer exceeds 64-bit"),
        ({"model": "embed", "item": "a", "keywords": {"dimensions": 2**63}}, 422, "dimensions"),
    ],
)
def test_wrong_trial_says_what_is_wrong(
    gateway: GatewayProcess, body: Any, status: int, text: str
) -> None:
    answer = gateway.post("/page/try", body)
    assert (answer.status_code, text in answer.json()["detail"]) == (status, True)
