"""Renders the Helm chart with Helm's own library, which a wheel brings; no cluster is needed.

Helm's bindings for Python can install a chart, but not just print it. So a small HTTP server stands
in for a cluster: it knows the kinds that the chart has, and says yes to all.
"""

import asyncio
import importlib.util
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "batchery"

#: API version -> kinds that the chart may have.
KINDS = {
    "v1": ["ConfigMap", "PersistentVolumeClaim", "Secret", "Service", "ServiceAccount"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "keda.sh/v1alpha1": ["ScaledObject"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
}


def needs_helm() -> pytest.MarkDecorator:
    """Skips a test by name where the library is missing."""
    is_there = importlib.util.find_spec("helm_sdkpy") is not None
    return pytest.mark.skipif(not is_there, reason="needs helm-sdkpy: `make test-all` installs it")


class Cluster(BaseHTTPRequestHandler):
    """What Helm asks of Kubernetes."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/version":
            self._answer({"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
        elif path == "/api":
            self._answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            self._answer({"kind": "APIGroupList", "groups": [group(each) for each in KINDS]})
        elif version in KINDS:
            names = [
                {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["create"]}
                for kind in KINDS[version]
            ]
            self._answer({"kind": "APIResourceList", "groupVersion": version, "resources": names})
        else:
            self._answer({"kind": "Status", "status": "Failure", "code": 404}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self._send(body, self.headers["content-type"], 201)

    do_PUT = do_POST

    def _answer(self, body: object, status: int = 200) -> None:
        self._send(json.dumps(body).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def group(version: str) -> dict[str, Any]:
    """An API group of one version."""
    served = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [served], "preferredVersion": served}


@contextmanager
def cluster() -> Iterator[Path]:
    """Starts the server; its kubeconfig."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kubeconfig"
        url = f"http://127.0.0.1:{server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(config))
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def render(values: dict[str, Any], release: str = "batchery") -> list[dict[str, Any]]:
    """Renders the chart, as `helm template` would.

    Args:
        values: As in a file for `--values`.
        release: The release's name.

    Returns:
        The objects, sorted by kind and name.

    Raises:
        Exception: The values break the schema, or a template refuses them.
    """
    return deepcopy(render_text(json.dumps(values), release))


@cache
def render_text(values: str, release: str) -> list[dict[str, Any]]:
    """The same for values as JSON."""
    import helm_sdkpy

    with cluster() as kubeconfig:
        configuration = helm_sdkpy.Configuration(namespace="batchery", kubeconfig=str(kubeconfig))
        install = helm_sdkpy.Install(configuration)
        done = asyncio.run(install.run(release, str(CHART), values=json.loads(values), wait=False))
    objects = [each for each in yaml.safe_load_all(done["manifest"]) if each]
    return sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"]))


def lint() -> list[dict[str, Any]]:
    """What `helm lint` says of the chart: 1 is information, 2 a warning, 3 an error."""
    import helm_sdkpy

    configuration = helm_sdkpy.Configuration(namespace="default")
    done = asyncio.run(helm_sdkpy.Lint(configuration).run(str(CHART)))
    found: list[dict[str, Any]] = done["Messages"] or []
    return found
