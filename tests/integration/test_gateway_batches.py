"""OpenAI's files and batches, by openai's own client, in front of real workers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from batchery_producer.gateway.batches.store import LIFE_S
from batchery_producer.gateway.callers import make_key
from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess, kill_runners
from support.harness import Worker, kill_all, leased, messages_in, queue_length, wait_for
from support.openai_files import OVER, begin, client_of, counts, end_of, lines_of, request, upload
from support.patience import patient

MODELS = {
    "embed": {**EMBED["embed"], "aliases": ["text-embedding-3-small"]},
    "slow": EMBED["embed"],
    # No worker serves it.
    "away": EMBED["embed"],
}

KEY, HASH = make_key()
OTHER_KEY, OTHER_HASH = make_key()
SMALL_KEY, SMALL_HASH = make_key()

#: What kombu adds to the name of a queue for jobs of the lowest class.
LOW = "\x06\x166"

#: Seconds after which a batch is taken up whose process was killed, and then some.
TAKEN_UP_S = LIFE_S + patient(60.0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slow worker notes what it computes."""
    return tmp_path_factory.mktemp("trace") / "trace"


#: Starts a worker of the slow task.
StartSlow = Callable[[], Worker]


@pytest.fixture(scope="module")
def start_slow(start_module_worker: StartWorker, trace: Path) -> StartSlow:
    env = {"TRACE": str(trace), "PAUSE_S": "0.05"}
    return lambda: start_module_worker("apps.slow_vectors", "-Q", "slow", env=env)


@pytest.fixture(scope="module", autouse=True)
def slow_workers(start_module_worker: StartWorker, start_slow: StartSlow) -> list[Worker]:
    """Those that were started; a worker of the model runs beside them."""
    models = {"embed": MODELS["embed"]}
    start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})
    return [start_slow()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all gateways keep their files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, files: Path) -> GatewayProcess:
    """Serves anybody on this machine."""
    options = {"files": str(files), "max_file_bytes": 1_000_000, "worker": True}
    return start_gateway(models=MODELS, gateway=options)


@pytest.fixture(scope="module")
def keyed(start_gateway: StartGateway, files: Path) -> GatewayProcess:
    """Serves those who have a key."""
    keys = {
        "shop": {"hash": HASH, "class": "high", "max_open_batches": 25},
        "other": {"hash": OTHER_HASH},
        "small": {"hash": SMALL_HASH, "max_items": 3, "max_chars": 50, "max_stored_bytes": 2000},
    }
    return start_gateway(models=MODELS, gateway={"keys": keys, "files": str(files), "worker": True})


@pytest.fixture
def api(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, as it comes."""
    with client_of(gateway) as made:
        yield made


def slow_rows(count: int) -> list[dict[str, Any]]:
    return [request(f"r-{n}", "x" * (n % 9 + 1), "slow") for n in range(count)]


def test_life_of_a_batch(api: openai.OpenAI) -> None:
    rows = [
        request("one", "a text", model="text-embedding-3-small"),
        request("many", ["a text", "another"], "text-embedding-3-small", encoding_format="base64"),
        request("short", "a text", "text-embedding-3-small", dimensions=8),
        request("ids", [[7592, 2088]], "text-embedding-3-small"),
        request("empty", "", "text-embedding-3-small"),
        request("number", 7, "text-embedding-3-small"),
    ]
    begun = begin(api, rows)
    assert begun.status == "validating"
    assert begun.expires_at == begun.created_at + 86_400
    batch = end_of(api, begun.id)
    assert (batch.status, batch.model, counts(batch)) == ("completed", "embed", (6, 3, 3))
    assert batch.metadata == {"made by": "a test"}
    # What is kept besides is for nobody.
    seen = [begun, batch, *api.batches.list(limit=1).data]
    assert [each.model_extra for each in seen] == [{}] * 3
    times = (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert all(at is not None and at >= batch.created_at for at in times)
    assert batch.errors is None
    answers = {line["custom_id"]: line["response"] for line in lines_of(api, batch.output_file_id)}
    assert set(answers) == {"one", "many", "short"}
    assert {answer["status_code"] for answer in answers.values()} == {200}
    one = api.embeddings.create(model="embed", input="a text", encoding_format="float")
    vector = answers["one"]["body"]["data"][0]["embedding"]
    assert vector == pytest.approx(one.data[0].embedding, abs=1e-5)
    assert [each["index"] for each in answers["many"]["body"]["data"]] == [0, 1]
    assert isinstance(answers["many"]["body"]["data"][0]["embedding"], str)
    assert len(answers["short"]["body"]["data"][0]["embedding"]) == 8
    tokens = sum(answer["body"]["usage"]["total_tokens"] for answer in answers.values())
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens == tokens > 0
    failed = {line["custom_id"]: line["response"] for line in lines_of(api, batch.error_file_id)}
    assert set(failed) == {"empty", "number", "ids"}
    assert {each["status_code"] for each in failed.values()} == {400}
    assert "is empty" in failed["empty"]["body"]["error"]["message"]
    assert "input: expected a text" in failed["number"]["body"]["error"]["message"]
    assert "is an alias" in failed["ids"]["body"]["error"]["message"]


def test_file_that_is_no_batch_fails_as_a_whole(api: openai.OpenAI) -> None:
    rows = [request("a", "good"), "{not json", request("a", "again")]
    batch = end_of(api, begin(api, rows).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.line, each.code) for each in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    with pytest.raises(openai.ConflictError, match="is failed: too late"):
        api.batches.cancel(batch.id)
    unknown = end_of(api, begin(api, [request("a", "text", model="gpt-9")]).id)
    assert unknown.errors is not None
    assert unknown.errors.data is not None
    assert "there are: embed" in str(unknown.errors.data[0].message)
    page = api.batches.list(limit=1)
    assert ([each.id for each in page.data], page.has_more) == ([unknown.id], True)
    assert [each.id for each in api.batches.list(limit=1)][:2] == [unknown.id, batch.id]


def test_files_are_kept_and_paged_and_deleted(api: openai.OpenAI) -> None:
    made = [upload(api, [request("a", f"text {n}")]) for n in range(3)]
    file, content = api.files.retrieve(made[0]), api.files.content(made[0]).content
    assert json.loads(content) == request("a", "text 0")
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(content), "batch")
    assert [each.id for each in api.files.list(limit=2, purpose="batch")][:3] == made[::-1]
    for listing in (api.files.list, api.batches.list):
        with pytest.raises(openai.BadRequestError, match="after: "):
            listing(after="nonsense")
    assert api.files.delete(made[1]).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        api.files.retrieve(made[1])
    assert made[1] not in [each.id for each in api.files.list()]


def test_bad_uploads_say_what_is_wrong(api: openai.OpenAI, gateway: GatewayProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        api.files.create(file=("a.jsonl", b"{}"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="file: empty"):
        api.files.create(file=("a.jsonl", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match=r"expires_after\[anchor\]"):
        api.files.create(
            file=("a.jsonl", b"{}"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    with pytest.raises(openai.APIStatusError, match="larger than 1000000 bytes") as raised:
        api.files.create(file=("a.jsonl", b"x" * 1_200_000), purpose="batch")
    assert raised.value.status_code == 413
    # A charset that takes minutes to decode a long field would hold up everybody.
    long = gateway.post(
        "/v1/files",
        content=b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n--b--\r\n'
        % (b"a" * 5000 + b"-" + b"a" * 5000),
        headers={"Content-Type": "multipart/form-data; boundary=b; charset=punycode"},
    )
    assert (long.status_code, "must be utf-8" in long.json()["error"]["message"]) == (400, True)
    with pytest.raises(openai.BadRequestError, match="maximum size"):
        api.files.create(file=("a.jsonl", b"{}"), purpose="x" * 20_000)  # type: ignore[arg-type]
    bare = gateway.post("/v1/files", {"purpose": "batch"})
    assert (bare.status_code, bare.json()["error"]["param"]) == (400, "file")


def test_bad_batches_say_what_is_wrong(api: openai.OpenAI) -> None:
    odd = api.files.create(file=("../../" + "n" * 300, b"{}"), purpose="batch")
    assert odd.filename.startswith("../../n")
    given: dict[str, Any] = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError, match="no such file"):
        api.batches.create(input_file_id="../../secret", **given)
    for wrong, text in (
        ({"endpoint": "/v1/responses"}, "should be '/v1/embeddings', "),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            api.batches.create(input_file_id=odd.id, **{**given, **wrong})
    with pytest.raises(openai.NotFoundError, match="no such batch"):
        api.batches.retrieve("batch_1")


def test_web_page_cannot_send_files(gateway: GatewayProcess) -> None:
    page = gateway.post(
        "/v1/files",
        files={"file": ("a.jsonl", b"{}")},
        data={"purpose": "batch"},
        headers={"origin": "https://evil.example"},
    )
    assert page.status_code == 403
    odd = gateway.post("/v1/files", headers={"origin": "http://["})
    assert odd.status_code == 403


def test_files_and_batches_of_another_key_are_not_there(keyed: GatewayProcess) -> None:
    with client_of(keyed, KEY) as mine, client_of(keyed, OTHER_KEY) as other:
        batch = begin(mine, [request("a", "text")])
        file_id = batch.input_file_id
        for call in (
            lambda: other.files.retrieve(file_id),
            lambda: other.files.content(file_id),
            lambda: other.files.delete(file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        listed = {each.id for each in [*other.files.list(), *other.batches.list()]}
        assert listed.isdisjoint({file_id, batch.id})
        ended = end_of(mine, batch.id)
        assert counts(ended) == (1, 1, 0)
        assert [each.id for each in mine.files.list(purpose="batch_output")] == [
            ended.output_file_id
        ]


def test_cancelled_batch_keeps_what_was_done(
    api: openai.OpenAI, trace: Path, redis_url: str
) -> None:
    ran_before = runs_in(trace)
    begun = begin(api, slow_rows(5000))
    wait_for(lambda: counts(api.batches.retrieve(begun.id))[1] > 0, "progress")
    cancelling = api.batches.cancel(begun.id)
    assert (cancelling.status, cancelling.cancelling_at is not None) == ("cancelling", True)
    batch = end_of(api, begun.id)
    total, completed, failed = counts(batch)
    assert (batch.status, total, failed) == ("cancelled", 5000, 0)
    assert batch.cancelled_at is not None
    lines = lines_of(api, batch.output_file_id)
    assert len({line["custom_id"] for line in lines}) == len(lines) == completed
    assert 0 < completed < 5000
    # Its jobs do not run on. (Jobs of a gateway that another test has killed are held for an hour.)
    wait_for(lambda: queue_length(redis_url, f"slow{LOW}") + leased(redis_url) == 0, "jobs gone")
    assert runs_in(trace) - ran_before < 5000


def runs_in(trace: Path) -> int:
    """How many items the slow task has run, for all tests of the module."""
    return len(trace.read_text().splitlines()) if trace.exists() else 0


def tenants_in(store: Any, queue: str) -> set[str | None]:
    messages = map(json.loads, messages_in(store, queue))
    return {message["headers"].get("batchery_tenant") for message in messages}


def test_jobs_are_of_the_key_s_tenant_and_class(keyed: GatewayProcess, store: Any) -> None:
    for key, tenant, queue in ((KEY, "shop", "away"), (OTHER_KEY, "other", f"away{LOW}")):
        with client_of(keyed, key) as api:
            begun = begin(api, [request("a", "text", model="away")])
            wait_for(lambda: tenant in tenants_in(store, queue), f"a job in {queue!r}")  # noqa: B023
            api.batches.cancel(begun.id)


def test_many_open_batches_of_one_key_keep_no_other_s_from_starting(
    keyed: GatewayProcess,
) -> None:
    with client_of(keyed, KEY) as crowd, client_of(keyed, OTHER_KEY) as other:
        file_id = upload(crowd, [request("a", "text", model="away")])

        def open_one() -> Batch:
            return crowd.batches.create(
                input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h"
            )

        # Those of the tests before may not be over yet.
        waiting = [open_one() for _ in range(20)]
        with pytest.raises(openai.RateLimitError, match="max_open_batches"):
            waiting += [open_one() for _ in range(6)]
        batch = end_of(other, begin(other, [request("a", "text")]).id, patient(90))
        assert (batch.status, counts(batch)) == ("completed", (1, 1, 0))
        # Another test may have cancelled its own, which are about to be over.
        ended = {*OVER, "cancelling"}
        open_ones = [each.id for each in crowd.batches.list() if each.status not in ended]
        for each in open_ones:
            crowd.batches.cancel(each)
        for each in open_ones:
            assert end_of(crowd, each, patient(90)).status == "cancelled"


def test_limits_of_a_key_hold_for_each_line_of_its_files(keyed: GatewayProcess) -> None:
    with client_of(keyed, SMALL_KEY) as api:
        rows = [
            request("good", ["a", "b", "c"]),
            request("items", ["a", "b", "c", "d"]),
            request("chars", "x" * 51),
        ]
        batch = end_of(api, begin(api, rows).id)
        assert (batch.status, counts(batch)) == ("completed", (3, 1, 2))
        lines = lines_of(api, batch.error_file_id)
        errors = {line["custom_id"]: line["response"] for line in lines}
        assert {each["status_code"] for each in errors.values()} == {413}
        assert "max_items = 3" in errors["items"]["body"]["error"]["message"]
        assert "max_chars = 50" in errors["chars"]["body"]["error"]["message"]


def test_line_of_many_texts_is_cut_into_jobs(start_gateway: StartGateway, files: Path) -> None:
    options = {"files": str(files), "max_items": 4_800, "worker": True}
    wide = start_gateway(models=MODELS, gateway=options)
    # More jobs than a slice of the file has.
    texts = ["x" * (n % 9 + 1) for n in range(4_800)]
    texts[4_305] = ""
    with client_of(wide) as api:
        rows = [request("many", texts[:1200], "slow"), request("bad", texts, "slow")]
        batch = end_of(api, begin(api, rows).id, patient(120))
        assert (batch.status, counts(batch)) == ("completed", (2, 1, 1))
        (line,) = lines_of(api, batch.output_file_id)
        vectors = [each["embedding"] for each in line["response"]["body"]["data"]]
        assert vectors == [[len(text), 1.0] for text in texts[:1200]]
        (error,) = lines_of(api, batch.error_file_id)
        assert "item 4305 of input: is empty" in error["response"]["body"]["error"]["message"]


def test_batch_is_finished_after_gateway_worker_and_device_were_killed(
    start_gateway: StartGateway,
    gateway: GatewayProcess,
    start_slow: StartSlow,
    slow_workers: list[Worker],
    files: Path,
) -> None:
    count = 800
    # The same place as a URL.
    options = {"files": f"file://{files}", "worker": True}
    other = start_gateway(models=MODELS, gateway=options)
    with client_of(other) as api:
        begun = begin(api, slow_rows(count))
        wait_for(lambda: counts(api.batches.retrieve(begun.id))[1] > 50, "progress")
    # Whoever of the two gateways runs it.
    kill_runners(gateway)
    kill_all(other.process)
    for device in slow_workers[-1].devices():
        device.kill()
    slow_workers[-1].kill()
    slow_workers.append(start_slow())
    with client_of(gateway) as api:
        batch = end_of(api, begun.id, TAKEN_UP_S)
        assert (batch.status, counts(batch)) == ("completed", (count, count, 0))
        lines = lines_of(api, batch.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r-{n}" for n in range(count))
    for line in lines:
        text = "x" * (int(line["custom_id"].removeprefix("r-")) % 9 + 1)
        assert line["response"]["body"]["data"][0]["embedding"] == [len(text), 1.0]
    # Of what it needed while it ran, there is nothing left.
    wait_for(lambda: not list(files.rglob(f"*{begun.id}*")), "tidy")
