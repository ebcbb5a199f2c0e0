"""schemathesis against the gateway's own schema: no request that it makes up is a surprise."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from batchery_producer.gateway.callers import make_key
from conftest import StartGateway, StartWorker
from support.gateway import GatewayProcess
from support.patience import patient
from support.served_models import save_models

#: Not `unsupported_method`: the files of the page are in no schema, and have a path with others.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)

#: What a request without a key may be answered: none, no such method, or no such host.
REFUSALS = {401, 403, 405, 413}

KEY, HASH = make_key()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny model of every kind that has a route."""
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def gateway(
    start_module_worker: StartWorker, start_gateway: StartGateway, models: dict[str, Any]
) -> GatewayProcess:
    """A gateway, and a worker with the models."""
    start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})
    return start_gateway(models=models)


@pytest.fixture(scope="module")
def keyed(start_gateway: StartGateway, models: dict[str, Any]) -> GatewayProcess:
    """A gateway of the same models, which wants a key."""
    return start_gateway(models=models, gateway={"keys": {"shop": {"hash": HASH}}})


@pytest.fixture(scope="module")
def schema(gateway: GatewayProcess) -> dict[str, Any]:
    """The schema of all routes."""
    found: dict[str, Any] = gateway.get("/openapi.json").json()
    return found


def with_known_models(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose requests name models that are there; all other names are answered alike."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    for name, described in made["components"]["schemas"].items():
        if "model" in described.get("required", ()) and name.endswith("Request"):
            kind = "embedding" if "Embed" in name else "rerank"
            described["properties"]["model"] = {"enum": [kind]}
        elif name.endswith("Request"):
            described["properties"].pop("model", None)
    for methods in made["paths"].values():
        for operation in methods.values():
            parameters = operation.get("parameters", ())
            operation["parameters"] = [each for each in parameters if each["in"] != "query"]
    return made


def test_every_answer_is_as_the_schema_says(
    gateway: GatewayProcess, schema: dict[str, Any], tmp_path: Path
) -> None:
    options = ("--checks", ",".join(CHECKS), "--max-examples", "4")
    answered = run_schemathesis(gateway, with_known_models(schema), tmp_path, *options)
    # So the checks have seen real answers, not errors alone. Names and ids are made up.
    named = {each for each in routes(schema) if "{" in each}
    silent = {each for each in routes(schema) if 200 not in answered[each]} - named
    # Nobody hears the bytes that it makes up, and no model is there that would.
    silent -= {"POST /v1/audio/transcriptions", "POST /v1/audio/translations"}
    assert silent <= {"POST /", "POST /v1/batches", "POST /page/try"}, silent


def test_no_wrong_request_is_a_fault_of_the_server(
    keyed: GatewayProcess, schema: dict[str, Any], tmp_path: Path
) -> None:
    # With a key, all of the server is reached that is without one.
    options = ["--mode", "negative", "--max-examples", "20", "--checks", "not_a_server_error"]
    options += ["--header", f"Authorization: Bearer {KEY}"]
    answered = run_schemathesis(keyed, schema, tmp_path, *options)
    # So it was let in.
    assert 422 in answered["POST /page/try"]


def test_request_without_its_key_is_refused_whatever_it_says(
    keyed: GatewayProcess, schema: dict[str, Any], tmp_path: Path
) -> None:
    options = ("--mode", "all", "--max-examples", "2", "--checks", "not_a_server_error")
    answered = run_schemathesis(keyed, schema, tmp_path, *options)
    for route in set(routes(schema)) - {"GET /health"}:
        assert answered[route] <= REFUSALS, route


def run_schemathesis(
    gateway: GatewayProcess, schema: dict[str, Any], folder: Path, *options: str
) -> dict[str, set[int]]:
    """Lets schemathesis make up requests, the same ones each time.

    Returns:
        The statuses that each route answered with.
    """
    path, report = folder / "openapi.json", folder / "report.har"
    path.write_text(json.dumps(schema))
    program = str(Path(sys.executable).with_name("schemathesis"))
    command = [program, "run", str(path), "--url", gateway.url, "--generation-deterministic"]
    command += ["--no-color", "--phases", "examples,coverage,fuzzing"]
    # By default an answer may take 10 s, and what makes up requests must be fast.
    command += ["--request-timeout", str(patient(60)), "--suppress-health-check", "all"]
    done = subprocess.run(
        [*command, "--report-har-path", str(report), *options],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return statuses(json.loads(report.read_text()))


def statuses(report: dict[str, Any]) -> dict[str, set[int]]:
    """The statuses that each route answered with, by method and path."""
    found = defaultdict(set)
    for entry in report["log"]["entries"]:
        route = f"{entry['request']['method']} {urlsplit(entry['request']['url']).path}"
        found[route].add(entry["response"]["status"])
    return found


def routes(schema: dict[str, Any]) -> list[str]:
    """All routes of a schema, as method and path."""
    return [
        f"{method.upper()} {path}"
        for path, methods in schema["paths"].items()
        for method in methods
    ]
