"""Builds dashboard.json with Grafana's foundation SDK: python deploy/monitoring/build_dashboard.py.

It answers four questions, a row each: is it keeping up, who waits, what does a GPU do, what fails.
"""

import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

FILE = Path(__file__).with_name("dashboard.json")

#: Chosen at the top of the dashboard.
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

#: Columns of Grafana's grid, of which there are 24, and rows.
STAT_SIZE = (4, 4)
GRAPH_SIZE = (8, 8)


class Panel(NamedTuple):
    """A graph, or a number where it has a limit from which on it is red."""

    title: str
    unit: str
    #: Query -> name of its lines.
    queries: dict[str, str]
    description: str = ""
    red_from: float | None = None
    is_stacked: bool = False


def rate(metric: str, *labels: str, where: str = "") -> str:
    """A counter's rate, summed by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({metric}{where}[$__rate_interval]))"


def increase(metric: str, *labels: str) -> str:
    """How often something happened, summed by labels."""
    return rate(metric, *labels).replace("rate(", "increase(", 1)


def quantile(share: float, metric: str, label: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', label, 'le')})"


def largest(metric: str, *labels: str) -> str:
    """What exporter and gateway both report, once."""
    return f"max by ({', '.join(labels)}) ({metric})" if labels else f"max({metric})"


FAILED = (
    rate("batchery_jobs_total", where='{outcome=~"failed|shed"}')
    + " / "
    + rate("batchery_jobs_total")
)
PADDING = (
    "1 - "
    + rate("batchery_tokens_total", "task")
    + " / "
    + rate("batchery_computed_tokens_total", "task")
)

#: An exporter that asks no workers does not count them. A gateway does, and has no metric of each.
WORKERS = "count(count by (worker) (batchery_worker_live)) or max(batchery_workers) or vector(0)"

NUMBERS = [
    Panel("Redis", "bool_on_off", {largest("batchery_broker_up"): ""}),
    Panel("Workers", "short", {WORKERS: ""}, "That Prometheus scrapes, or that answered."),
    Panel(
        "Workers that hang",
        "short",
        {"count(batchery_worker_live == 0) or vector(0)": ""},
        "Not live: a device gives no sign while it has work.",
        red_from=1,
    ),
    Panel("Oldest job", "s", {largest("batchery_queue_oldest_job_seconds"): ""}, red_from=300),
    Panel(
        "Failed",
        "percentunit",
        {FAILED: ""},
        "Of all jobs that ended; with those that were shed.",
        red_from=0.05,
    ),
    Panel("Dead letters", "short", {largest("batchery_dead_letters"): ""}, red_from=1),
]

ROWS = {
    "Is it keeping up?": [
        Panel(
            "Jobs per second",
            "ops",
            {rate("batchery_jobs_total", "task", "outcome"): "{{task}} {{outcome}}"},
            is_stacked=True,
        ),
        Panel(
            "Unfinished jobs",
            "short",
            {
                largest("batchery_queue_waiting_jobs", "queue"): "{{queue}} waiting",
                largest("batchery_queue_leased_jobs", "queue"): "{{queue}} with a worker",
            },
            "It keeps up if this does not grow.",
            is_stacked=True,
        ),
        Panel(
            "Tokens per second",
            "short",
            {rate("batchery_tokens_total", "task"): "{{task}}"},
            "Of the items, without padding.",
        ),
    ],
    "Who waits?": [
        Panel(
            "Age of the oldest job",
            "s",
            {largest("batchery_queue_oldest_job_seconds", "queue"): "{{queue}}"},
        ),
        Panel(
            "Wait until the batch leaves",
            "s",
            {
                quantile(0.5, "batchery_queue_wait_seconds", "task"): "{{task}} p50",
                quantile(0.99, "batchery_queue_wait_seconds", "task"): "{{task}} p99",
            },
            "From sending a job to the departure of its batch.",
        ),
        Panel(
            "Jobs that workers hold",
            "short",
            {
                largest("batchery_worker_waiting_jobs", "worker"): "{{worker}} not begun",
                largest("batchery_scheduled_jobs"): "with an ETA",
            },
        ),
    ],
    "What does a GPU do?": [
        Panel(
            "Busy",
            "percentunit",
            {
                rate(
                    "batchery_device_forward_seconds_total", "worker", "device"
                ): "{{worker}} {{device}}"
            },
            "Share of the time in forward passes.",
        ),
        Panel(
            "Items of a batch",
            "short",
            {
                rate("batchery_items_total", "task")
                + " / "
                + rate("batchery_batches_total", "task"): "{{task}} mean",
                quantile(0.9, "batchery_batch_size", "task"): "{{task}} p90",
            },
        ),
        Panel(
            "Padding", "percentunit", {PADDING: "{{task}}"}, "Computed tokens that carry nothing."
        ),
        Panel(
            "Where a batch's time goes",
            "s",
            {
                rate("batchery_stage_seconds_total", "stage")
                + " / ignoring (stage) group_left () "
                + rate("batchery_batches_total"): "{{stage}}"
            },
            is_stacked=True,
        ),
        Panel(
            "Memory of GPUs",
            "bytes",
            {
                largest(
                    "batchery_device_memory_bytes", "worker", "device"
                ): "{{worker}} {{device}}",
                largest("batchery_device_memory_size_bytes", "device"): "{{device}}, all of it",
            },
        ),
        Panel(
            "Token budget of a pass",
            "short",
            {
                largest(
                    "batchery_model_batch_tokens", "worker", "device", "model"
                ): "{{worker}} {{device}} {{model}}"
            },
            "It falls where memory was too little.",
        ),
        Panel(
            "Slots taken",
            "percentunit",
            {
                largest("batchery_model_slots_taken", "worker", "device", "model")
                + " / "
                + largest(
                    "batchery_model_slots", "worker", "device", "model"
                ): "{{worker}} {{device}} {{model}}"
            },
            "Of models that write texts.",
        ),
        Panel(
            "First token",
            "s",
            {
                quantile(0.5, "batchery_first_token_seconds", "task"): "{{task}} p50",
                quantile(0.99, "batchery_first_token_seconds", "task"): "{{task}} p99",
                quantile(0.5, "batchery_token_seconds", "task"): "{{task}} between two, p50",
            },
            "Of a text, from sending its job.",
        ),
        Panel(
            "Tokens of texts",
            "ops",
            {rate("batchery_text_tokens_total", "task", "type"): "{{task}} {{type}}"},
        ),
        Panel(
            "Main memory of devices",
            "bytes",
            {
                largest(
                    "batchery_device_resident_memory_bytes", "worker", "device"
                ): "{{worker}} {{device}}"
            },
        ),
        Panel(
            "Not computed",
            "ops",
            {
                rate(
                    "batchery_cache_items_total", "task", "result", where='{result!="computed"}'
                ): "{{task}} {{result}}"
            },
            "Items that the cache had, or an equal one's result.",
        ),
    ],
    "What fails?": [
        Panel(
            "Failures by error",
            "ops",
            {rate("batchery_failures_total", "error"): "{{error}}"},
            is_stacked=True,
        ),
        Panel(
            "Devices",
            "short",
            {
                increase("batchery_device_restarts_total", "worker"): "{{worker}} restarted",
                increase("batchery_model_out_of_memory_total", "worker", "model"): (
                    "{{worker}} {{model}} out of memory"
                ),
            },
        ),
        Panel(
            "Jobs of dead workers",
            "ops",
            {rate("batchery_leases_recovered_total", "worker"): "put back by {{worker}}"},
        ),
        Panel(
            "Jobs on the slow way",
            "ops",
            {rate("batchery_tracer_jobs_total", "reason"): "{{reason}}"},
            "Celery's tracer completes them, in about ten times the time.",
            is_stacked=True,
        ),
        Panel(
            "Event loop of workers",
            "s",
            {largest("batchery_event_loop_lag_seconds", "worker"): "{{worker}}"},
            "The longest time for which the main process did nothing else.",
        ),
        Panel(
            "Redis, as workers see it",
            "s",
            {
                rate("batchery_redis_script_seconds_sum", "script")
                + " / "
                + rate("batchery_redis_script_seconds_count", "script"): "{{script}}"
            },
            "Mean time of a script, network included.",
        ),
        Panel(
            "Gateway: requests",
            "reqps",
            {
                rate(
                    "batchery_gateway_requests_total",
                    "status",
                    where='{route!~"/health|/metrics"}',
                ): "{{status}}"
            },
            "Without those for health and metrics.",
            is_stacked=True,
        ),
        Panel(
            "Gateway: time of a request",
            "s",
            {
                quantile(
                    0.5, "batchery_gateway_request_duration_seconds", "route"
                ): "{{route}} p50",
                quantile(
                    0.99, "batchery_gateway_request_duration_seconds", "route"
                ): "{{route}} p99",
            },
        ),
        Panel(
            "Gateway: failed items",
            "ops",
            {rate("batchery_gateway_failed_items_total", "kind"): "{{kind}}"},
        ),
    ],
}


def choose_namespace(query: str) -> str:
    """The query, for the namespaces that are chosen; where metrics have none, it finds all."""
    return re.sub(
        r"(batchery_\w+)(\{?)",
        lambda found: found[1] + '{namespace=~"$namespace"' + ("," if found[2] else "}"),
        query,
    )


def add_queries(builder: stat.Panel | timeseries.Panel, panel: Panel) -> None:
    """What both kinds of panel have."""
    builder.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    for number, (query, name) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(choose_namespace(query)).range()
        target.legend_format(name or "__auto")
        builder.with_target(target.ref_id(chr(ord("A") + number)).datasource(SOURCE))


def build_number(panel: Panel) -> stat.Panel:
    """A number, with its last hour behind it."""
    builder = stat.Panel().span(STAT_SIZE[0]).height(STAT_SIZE[1])
    add_queries(builder, panel)
    steps = [Threshold(value=None, color="green")]
    if panel.red_from is not None:
        steps.append(Threshold(value=panel.red_from, color="red"))
    builder.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return builder.graph_mode(options.BigValueGraphMode.AREA)


def build_graph(panel: Panel) -> timeseries.Panel:
    """Lines over time."""
    builder = timeseries.Panel().span(GRAPH_SIZE[0]).height(GRAPH_SIZE[1]).min(0)
    add_queries(builder, panel)
    if panel.unit == "percentunit":
        builder.axis_soft_max(1)
    if panel.is_stacked:
        builder.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
        builder.fill_opacity(30)
    legend = common.VizLegendOptions().show_legend(True)
    legend.placement(options.LegendPlacement.BOTTOM).display_mode(options.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI)
    return builder.legend(legend).tooltip(tooltip)


def build() -> str:
    """The dashboard, as the text of its file."""
    board = (
        dashboard.Dashboard("Batchery")
        .uid("batchery")
        .description("Is it keeping up, who waits, what does a GPU do, what fails.")
        .tags(["batchery", "celery"])
        .time("now-1h", "now")
        .refresh("30s")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("namespace")
            .datasource(SOURCE)
            .query("label_values(batchery_broker_up, namespace)")
            .include_all(True)
            .all_value(".*")
            .multi(True)
            .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
        )
    )
    ids = itertools.count(1)
    for panel in NUMBERS:
        board.with_panel(build_number(panel).id(next(ids)))
    for title, panels in ROWS.items():
        board.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            board.with_panel(build_graph(panel).id(next(ids)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(build(), encoding="utf-8")
