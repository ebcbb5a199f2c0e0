"""Checks of the app: its Celery settings, and what is wrapped around its tasks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kombu.serialization import registry  # type: ignore[attr-defined]

from batchery.doctor import thresholds as limits
from batchery.doctor.facts import Facts
from batchery.doctor.findings import Find, Symptom, when

#: Kombu's defaults for `visibility_timeout`, in seconds, and for `priority_steps`.
VISIBILITY_S = 3600.0
PRIORITY_STEPS = (0, 3, 6, 9)

#: Where Celery's tracer comes from, if nothing slows it: Celery itself, or a Sentry that is known.
KNOWN_TRACERS = ("celery.app.trace", "sentry_sdk.integrations.celery")


def check_setting(setting: str, is_wrong: Callable[[Any], object]) -> Find:
    """A check of one Celery setting, whose symptom is its value."""

    def find(facts: Facts) -> list[Symptom]:
        value = facts.conf[setting]
        return when(is_wrong(value), f"{setting} is {value!r}")

    return find


def _find_no_install(facts: Facts) -> list[Symptom]:
    text = f"{len(facts.tasks)} batch tasks, and install was not called"
    return when(facts.tasks and not facts.is_installed, text)


def _uses_leases(facts: Facts) -> bool:
    options = facts.conf["broker_transport_options"]
    return facts.is_installed and bool(options.get("leases", True))


def _find_short_visibility(facts: Facts) -> list[Symptom]:
    if _uses_leases(facts):
        return []
    options = facts.conf["broker_transport_options"]
    visible_s = float(options.get("visibility_timeout") or VISIBILITY_S)
    limits_s = [facts.conf["task_time_limit"], *(task.time_limit_s for task in facts.tasks)]
    longest_s = max((each for each in limits_s if each), default=VISIBILITY_S)
    text = f"visibility_timeout is {visible_s:g} s, and jobs may run for {longest_s:g} s"
    return when(visible_s < longest_s, text)


def _find_early_acks(facts: Facts) -> Iterator[Symptom]:
    for task in facts.tasks:
        yield from when(not task.acks_late, f"task {task.name} has acks_late=False")


def _name_serializers(accepted: Iterable[str]) -> list[str]:
    """Names of serializers, as Celery takes their content types, too."""
    return [registry.type_to_name.get(each, each) for each in accepted]


def _find_refused(facts: Facts) -> Iterator[Symptom]:
    accepted = list(facts.conf["accept_content"])
    for name in sorted({facts.conf["task_serializer"], *(task.serializer for task in facts.tasks)}):
        text = f"messages are written as {name}, and accept_content is {accepted}"
        is_refused = name not in _name_serializers(accepted)
        yield from when(is_refused, text, accept=sorted({"json", name}))


def _find_odd_expiry(facts: Facts) -> list[Symptom]:
    expires = facts.conf["result_expires"]
    seconds = expires.total_seconds() if hasattr(expires, "total_seconds") else expires
    text = f"result_expires is {f'{seconds:g} s' if seconds else 'never'}"
    return when(not seconds or seconds < limits.MIN_RESULT_S, text)


def _find_other_server(facts: Facts) -> list[Symptom]:
    broker, results = facts.servers
    text = f"the broker is {broker}, and results are on {results}"
    return when(facts.tasks and facts.backend == "redis" and broker != results, text)


def _find_ignored_results(facts: Facts) -> list[Symptom]:
    names = [task.name for task in facts.tasks if task.ignore_result]
    return when(names, f"results of {', '.join(names)} are ignored")


def _find_other_steps(facts: Facts) -> Iterator[Symptom]:
    mine = _read_steps(facts.conf["broker_transport_options"])
    for worker, options in facts.worker_options.items():
        steps = _read_steps(options)
        text = f"priority_steps are {mine} here, and {steps} in {worker}"
        yield from when(steps != mine, text, steps=mine)


def _read_steps(options: Mapping[str, Any]) -> list[int]:
    return sorted(map(int, options.get("priority_steps") or PRIORITY_STEPS))


def _find_wrapped_tracer(facts: Facts) -> list[Symptom]:
    is_wrapped = facts.tasks and facts.tracer_module not in KNOWN_TRACERS
    return when(is_wrapped, f"Celery's build_tracer is that of {facts.tracer_module}")


CHECKS: Mapping[str, Find] = {
    "settings-invalid": lambda facts: when(facts.settings_problem, facts.settings_problem),
    "app-not-installed": _find_no_install,
    "visibility-timeout": _find_short_visibility,
    "acks-early": _find_early_acks,
    "prefetch-unlimited": check_setting(
        "worker_prefetch_multiplier", lambda value: not 0 < value <= limits.MAX_PREFETCH
    ),
    "requeue-forever": check_setting("task_reject_on_worker_lost", bool),
    "serializer-refused": _find_refused,
    "pickle-accepted": check_setting(
        "accept_content", lambda value: "pickle" in str(_name_serializers(value))
    ),
    "result-expires": _find_odd_expiry,
    "result-backend-missing": lambda facts: when(
        facts.tasks and facts.backend == "none", "the app has no result backend"
    ),
    "result-server": _find_other_server,
    "results-ignored": _find_ignored_results,
    "always-eager": check_setting("task_always_eager", bool),
    "connection-retries": check_setting("broker_connection_max_retries", bool),
    "priority-steps": _find_other_steps,
    "tracer-wrapped": _find_wrapped_tracer,
}
