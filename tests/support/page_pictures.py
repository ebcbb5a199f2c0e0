"""Makes the pictures of the gateway's page in docs/, with a real worker: run this file."""

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from celery import Celery

# As a script it has only its own folder on the path.
TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from batchery.protocol.headers import sent_now  # noqa: E402
from batchery_worker.devstack.redis_server import EmbeddedRedis  # noqa: E402
from support.browser import DESK, PHONE, Browser, chromium  # noqa: E402
from support.gateway import EMBED, GatewayProcess  # noqa: E402
from support.harness import Worker, wait_for  # noqa: E402

DOCS = TESTS.parent / "docs"

#: How long jobs run before the pictures, in seconds: for a line of some length.
RUN_S = 100.0

TEXT = "The food was delicious, and the waiter knew every wine by its first name. "


@contextmanager
def load(redis_url: str) -> Iterator[None]:
    """Sends texts, now more and now fewer; some of them are empty, and fail."""
    done = threading.Event()
    client = Celery(broker=redis_url, backend=redis_url, set_as_current=False)

    def send() -> None:
        sent = 0
        while not done.wait(0.25):
            for _ in range(int(6 + 5 * math.sin(time.monotonic() / 6))):
                sent += 1
                text = TEXT * (1 + sent % 5) if sent % 400 else ""
                client.send_task(
                    "embed", [text], queue="embed", ignore_result=True, headers=sent_now()
                )

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        client.close()


def begin_batch(gateway: GatewayProcess) -> None:
    """Begins a batch, so that there are files, too."""
    body = {"model": "embed", "input": TEXT}
    request = {"method": "POST", "url": "/v1/embeddings", "body": body}
    lines = (json.dumps({"custom_id": str(number), **request}) for number in range(200))
    content = "\n".join(lines).encode()
    file = gateway.post(
        "/v1/files", files={"file": ("reviews.jsonl", content)}, data={"purpose": "batch"}
    )
    wanted = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
    gateway.post("/v1/batches", {"input_file_id": file.json()["id"], **wanted}).raise_for_status()


def take(browser: Browser, gateway: GatewayProcess) -> None:
    """Takes the pictures."""
    begin_batch(gateway)
    browser.looks(DESK)
    browser.get(gateway.url)
    time.sleep(RUN_S)
    browser.click("run")
    wait_for(lambda: browser.number("items_per_s") > 25, "the load is high", 60)
    wait_for(lambda: " numbers, " in browser.text("answer"), "an answer", 60)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    whole = (DESK[0], browser.execute_script("return document.documentElement.scrollHeight"))
    for name, size, dark in (
        ("desk", whole, False),
        ("desk_dark", whole, True),
        ("phone", PHONE, False),
    ):
        browser.looks(size, dark=dark)
        browser.execute_script("scrollTo(0, 0)")
        time.sleep(1.5)
        browser.save_screenshot(str(DOCS / f"gateway_{name}.png"))


def main() -> None:
    """Entry point."""
    with TemporaryDirectory() as folder, EmbeddedRedis() as redis, chromium() as browser:
        models = {"embed": {**EMBED["embed"], "aliases": ["text-embedding-3-small"]}}
        environment = {"BATCHERY_MODELS": json.dumps(models)}
        arguments = ("-n", "cpu-box@example", "-Q", "embed")
        worker = Worker(Path(folder), redis.url, "batchery.app", *arguments, env=environment)
        gateway = GatewayProcess(Path(folder), redis.url, models=models)
        try:
            worker.wait_ready()
            gateway.wait_ready()
            with load(redis.url):
                take(browser, gateway)
        finally:
            gateway.kill()
            worker.kill()


if __name__ == "__main__":
    main()
