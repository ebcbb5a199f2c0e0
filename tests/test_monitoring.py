"""Alerts, dashboard and autoscaling ask for what there is, and answer as they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.deployed import DEPLOY, ROOT, find_metrics
from support.helm import needs_helm, render

MONITORING = DEPLOY / "monitoring"
RULES = MONITORING / "rules.yml"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
METRICS_PAGES = [ROOT / "docs" / name for name in ("metrics.md", "gateway.md")]

#: Labels that Prometheus adds, or whoever finds its targets.
OF_PROMETHEUS = {"namespace", "job", "instance", "le", "app_kubernetes_io_name"}

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    """As Prometheus gets them."""
    targets = [each for panel in DASHBOARD["panels"] for each in panel.get("targets", [])]
    return [each["expr"].replace("$__rate_interval", "1m") for each in targets]


def autoscaling_queries(queues: list[str], selector: str = "") -> list[str]:
    values = {
        "redis": {"existingSecret": "a"},
        "gateway": {"existingSecret": "b"},
        "workers": {"default": {"queues": queues, "autoscaling": {"enabled": True}}},
        "monitoring": {"prometheusUrl": "http://prometheus:9090", "selector": selector},
    }
    [scaled] = [each for each in render(values) if each["kind"] == "ScaledObject"]
    triggers = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert {each["ignoreNullValues"] for each in triggers} == {"false"}
    return [each["query"] for each in triggers]


def queue(name: str, waiting: int, leased: int, age_s: int) -> dict[str, str]:
    """What exporter and gateway say of a queue for nine minutes."""
    labels = f'{{queue="{name}",job="exporter"}}'
    again = labels.replace("exporter", "gateway")
    return {
        f"batchery_queue_waiting_jobs{labels}": f"{waiting}x9",
        f"batchery_queue_waiting_jobs{again}": f"{waiting}x9",
        f"batchery_queue_leased_jobs{labels}": f"{leased}x9",
        f"batchery_queue_oldest_job_seconds{labels}": f"{age_s}x9",
    }


def promtool(*arguments: str, folder: Path = MONITORING) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_rules_are_well_formed_and_fire_when_provoked_and_only_then() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules_test.yml")


@needs_promtool
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    text = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    shutil.copy(RULES, tmp_path)
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/", ""))
    promtool("check", "config", "prometheus.yml", folder=tmp_path)


@needs_promtool
def test_every_query_of_the_dashboard_can_be_asked(tmp_path: Path) -> None:
    queries = dashboard_queries()
    assert len(queries) > 30
    # Each metric is of the namespaces that were chosen.
    assert all("batchery_" in each for each in queries)
    assert not [each for each in queries if re.search(r"batchery_\w+(?!\w|\{namespace=~)", each)]
    records = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    group = {"groups": [{"name": "dashboard", "rules": records}]}
    (tmp_path / "rules.yml").write_text(json.dumps(group))
    promtool("check", "rules", "rules.yml", folder=tmp_path)


def test_every_metric_and_label_is_documented() -> None:
    """And so it is there: unit/common/operations/test_families.py compares page and code."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in METRICS_PAGES)
    asked = " ".join([*dashboard_queries(), *(rule["expr"] for rule in rules())])
    named = set(re.findall(r"`(\w+)`", pages))
    assert find_metrics(asked) - named == set()
    lists = re.findall(r"(?:by|on|group_left) \(([\w, ]+)\)", asked)
    used = set(re.findall(r"\w+", " ".join(lists))) | set(re.findall(r"[{,] *(\w+)[=!]", asked))
    assert used - named - OF_PROMETHEUS == set()


@needs_helm()
@needs_promtool
def test_autoscaling_counts_what_waits_and_runs_and_knows_a_lost_exporter(tmp_path: Path) -> None:
    jobs, oldest = autoscaling_queries(["shop.embed", "mood"])
    everything, _ = autoscaling_queries([])
    own_jobs, own_oldest = autoscaling_queries(["shop.embed", "mood"], 'namespace="shop"')

    def case(series: dict[str, str], expected: dict[str, float | None]) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": each, "values": text} for each, text in series.items()],
            "promql_expr_test": [
                {
                    "expr": query,
                    "eval_time": "9m",
                    "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
                }
                for query, value in expected.items()
            ],
        }

    up = {"batchery_broker_up": "1x9"}
    queues = {
        **queue("shop.embed", 40, 2, 7),
        **queue("mood", 1, 0, 90),
        **queue("shop-embed", 9, 9, 900),
    }
    own = queue("batchery.gateway", 5, 5, 5)
    unleased = {name: text for name, text in queues.items() if "leased" not in name}
    cases = [
        case({**up, **queues, **own}, {jobs: 43, oldest: 90, everything: 61}),
        case({**up, **unleased}, {jobs: 41}),
        # The last batch runs: there is something to do.
        case({**up, **queue("shop.embed", 0, 3, 0)}, {jobs: 3, oldest: 0}),
        # Nothing is there, and that is known.
        case(up, {jobs: 0, oldest: 0, everything: 0}),
        # Redis is away, or nobody reports: nothing is known, so nothing changes.
        case({"batchery_broker_up": "0x9"}, {jobs: None, oldest: None}),
        case({"batchery_broker_up": "1x5 stale"}, {jobs: None, oldest: None}),
        # Of another release nothing is wanted, where a label tells.
        case({**up, **queues}, {own_jobs: None, own_oldest: None}),
        case(
            {each.replace("job=", 'namespace="shop",job='): n for each, n in queues.items()}
            | queue("shop.embed", 900, 900, 900),
            {own_jobs: 43, own_oldest: 90},
        ),
        case({'batchery_broker_up{namespace="shop"}': "1x9"}, {own_jobs: 0, own_oldest: 0}),
    ]
    (tmp_path / "test.yml").write_text(
        json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": cases})
    )
    promtool("test", "rules", "test.yml", folder=tmp_path)
