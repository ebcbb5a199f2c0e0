"""Checks of the workers that answer: queues, batches, devices."""

from collections.abc import Callable, Iterator, Mapping

from batchery.cli.stats import NOT_INSTALLED
from batchery.doctor import thresholds as limits
from batchery.doctor.facts import Facts
from batchery.doctor.findings import Find, Symptom, when
from batchery.protocol.figures import GIVEN_UP, DeviceSnapshot, WorkerFigures

# Who consumes what


def _list_consumed(facts: Facts) -> set[str]:
    """All queues that workers consume, by what they answer or have registered."""
    registered = [each.queues or () for each in facts.registered]
    return {name for names in (*facts.consumed.values(), *registered) for name in names}


def _find_no_worker(facts: Facts) -> list[Symptom]:
    is_there = facts.consumed or facts.registered
    return when(not is_there, "no worker answers, and none is registered")


def _find_orphaned(facts: Facts) -> list[Symptom]:
    # A worker that lives gives them back within seconds.
    by_queue = facts.survey.orphaned
    jobs, queues = sum(by_queue.values()), ", ".join(map(repr, sorted(by_queue)))
    text = f"dead workers hold {jobs:,} jobs of {queues}, and no worker lives"
    return when(jobs and not facts.registered, text)


def _find_not_installed(facts: Facts) -> list[Symptom]:
    problems = facts.survey.problems(None)
    return [Symptom(f"{name} {why}") for name, why in problems.items() if why == NOT_INSTALLED]


def _find_stock_workers(facts: Facts) -> Iterator[Symptom]:
    leased = {each.name for each in facts.registered}
    queues = {task.queue for task in facts.tasks}
    for worker, consumed in facts.consumed.items():
        shared = sorted(queues.intersection(consumed))
        # One whose name is not known yet may be any.
        is_stock = worker not in leased and None not in leased
        text = f"{worker} has no leases, and consumes {', '.join(shared)}"
        yield from when(is_stock and shared, text)


def _find_versions(facts: Facts) -> list[Symptom]:
    versions = {each.name or "a worker": each.version or "unknown" for each in facts.registered}
    spelled = ", ".join(f"{name} has {version}" for name, version in sorted(versions.items()))
    return when(set(versions.values()) - {facts.version}, f"{facts.version} here, and {spelled}")


def _find_worker_clocks(facts: Facts) -> Iterator[Symptom]:
    for worker, ahead_s in facts.worker_ahead_s.items():
        is_off = abs(ahead_s) > limits.MAX_SKEW_S
        yield from when(is_off, f"{worker}: its clock is {ahead_s:+.1f} s off this machine's")


def _find_unserved(facts: Facts) -> Iterator[Symptom]:
    consumed = _list_consumed(facts)
    for queue, jobs in facts.survey.queues.items():
        text = f"{jobs:,} jobs wait in queue {queue!r}, and no worker consumes it"
        yield from when(jobs and queue not in consumed, text, queue=queue)


def _find_idle_queues(facts: Facts) -> Iterator[Symptom]:
    consumed, waiting = _list_consumed(facts), facts.survey.queues
    for queue in sorted({task.queue for task in facts.tasks} - consumed):
        text = f"no worker consumes queue {queue!r}"
        yield from when(consumed and not waiting.get(queue), text, queue=queue)


def _find_dead_letters(facts: Facts) -> list[Symptom]:
    # None of a broker that is no Redis.
    letters = facts.survey.dead_letters or 0
    return when(letters, f"{letters:,} dead letters")


# Figures of one worker

#: A check of one worker's figures; the text of a symptom begins with the worker's name.
FindInWorker = Callable[[Facts, WorkerFigures], list[Symptom]]


def check_workers(find: FindInWorker) -> Find:
    """A check of each worker with devices."""

    def find_all(facts: Facts) -> Iterator[Symptom]:
        for worker, figures in facts.survey.figures.items():
            for symptom in find(facts, figures):
                yield Symptom(f"{worker}: {symptom.found}", worker=worker, **symptom.values)

    return find_all


def _find_slow_way(_: Facts, figures: WorkerFigures) -> list[Symptom]:
    slow, jobs = figures.batches.tracer_jobs, figures.batches.jobs
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in slow.most_common(3))
    text = f"{slow.total():,} of {jobs:,} jobs, because of {reasons}"
    return when(slow.total() > jobs * limits.MAX_TRACER_SHARE, text)


def _find_small_batches(facts: Facts, figures: WorkerFigures) -> list[Symptom]:
    batches, lone = figures.batches.batches, figures.batches.batch_sizes["<=1"]
    waiting = sum(facts.survey.queues.values()) + figures.waiting
    models = [model for device in figures.devices.values() for model in device.models.values()]
    # Jobs in slots have a batch each.
    if any(model.slots for model in models) or batches < limits.MIN_BATCHES:
        return []
    is_small = lone > batches * limits.MAX_LONE_SHARE and waiting > limits.MIN_WAITING_JOBS
    text = f"{lone:,} of {batches:,} batches have one item, and {waiting:,} jobs wait"
    return when(is_small, text)


def _find_padding(_: Facts, figures: WorkerFigures) -> list[Symptom]:
    waste = figures.batches.padding_waste or 0.0
    is_known = figures.batches.computed_tokens > limits.MIN_TOKENS
    return when(is_known and waste > limits.MAX_PADDING, f"{waste:.0%} of all tokens are padding")


def _find_missed_target(facts: Facts, figures: WorkerFigures) -> list[Symptom]:
    target_ms = facts.settings.target_latency_ms
    took_ms = (figures.batches.mean_waited_ms or 0.0) + (figures.batches.mean_forward_ms or 0.0)
    text = f"jobs take {took_ms:,.0f} ms on average, and target_latency_ms is {target_ms}"
    return when(target_ms and took_ms > target_ms, text)


def _find_restarts(_: Facts, figures: WorkerFigures) -> list[Symptom]:
    count = figures.batches.device_restarts
    return when(count, f"{count:,} device processes died and were replaced")


def _find_idle_gpus(facts: Facts, figures: WorkerFigures) -> list[Symptom]:
    is_cpu = all(name.startswith("cpu") for name in figures.devices)
    text = f"it computes on the CPU, beside {facts.cuda_devices} CUDA devices"
    return when(is_cpu and facts.cuda_devices, text)


def _find_local_idle_gpus(facts: Facts) -> list[Symptom]:
    # What devices another machine has, nobody knows here.
    here = {each.name for each in facts.registered if each.host == facts.host}
    found = check_workers(_find_idle_gpus)(facts)
    return [each for each in found if each.values["worker"] in here]


# Figures of one device


def check_devices(find: Callable[[Facts, str, DeviceSnapshot], list[Symptom]]) -> Find:
    """A check of each device of each worker; `find` gets its name and figures."""

    def find_in_worker(facts: Facts, figures: WorkerFigures) -> list[Symptom]:
        devices = figures.devices.items()
        return [symptom for name, device in devices for symptom in find(facts, name, device)]

    return check_workers(find_in_worker)


def _find_given_up(_: Facts, name: str, device: DeviceSnapshot) -> list[Symptom]:
    is_gone, text = device.state == GIVEN_UP, f"{name} was given up: {device.error}"
    return when(is_gone, text, device=name)


def _find_out_of_memory(_: Facts, name: str, device: DeviceSnapshot) -> list[Symptom]:
    return [
        Symptom(f"{model} ran out of memory {each.out_of_memory:,} times on {name}", model=model)
        for model, each in device.models.items()
        if each.out_of_memory > limits.MAX_OUT_OF_MEMORY
    ]


def _find_full_device(_: Facts, name: str, device: DeviceSnapshot) -> list[Symptom]:
    held, total = device.memory.reserved_bytes or 0, device.memory.total_bytes or 1
    is_full = held > total * limits.MAX_DEVICE_MEMORY
    return when(is_full, f"{held / total:.0%} of the memory of {name} is held")


def _find_fp32(facts: Facts, name: str, device: DeviceSnapshot) -> list[Symptom]:
    models = facts.settings.models.items()
    slow = [model for model, each in models if each.dtype == "fp32" and model in device.models]
    is_cuda = name.startswith("cuda")
    return [Symptom(f"{each} runs in fp32 on {name}", model=each) for each in slow if is_cuda]


CHECKS: Mapping[str, Find] = {
    "worker-none": _find_no_worker,
    "jobs-orphaned": _find_orphaned,
    "worker-not-installed": _find_not_installed,
    "worker-stock": _find_stock_workers,
    "worker-versions": _find_versions,
    "worker-clock": _find_worker_clocks,
    "queue-unserved": _find_unserved,
    "queue-without-worker": _find_idle_queues,
    "dead-letters": _find_dead_letters,
    "slow-way": check_workers(_find_slow_way),
    "small-batches": check_workers(_find_small_batches),
    "padding-waste": check_workers(_find_padding),
    "latency-missed": check_workers(_find_missed_target),
    "device-restarts": check_workers(_find_restarts),
    "device-given-up": check_devices(_find_given_up),
    "device-on-cpu": _find_local_idle_gpus,
    "device-out-of-memory": check_devices(_find_out_of_memory),
    "device-memory": check_devices(_find_full_device),
    "device-fp32": check_devices(_find_fp32),
}
