"""Checks of the broker's Redis."""

from collections.abc import Iterable, Iterator, Mapping

from batchery.doctor import thresholds as limits
from batchery.doctor.facts import Facts
from batchery.doctor.findings import Find, Symptom, when
from batchery.transport.worker_registry import OLDEST_REDIS


def _find_old_version(facts: Facts) -> list[Symptom]:
    version = str(facts.info["redis_version"])
    is_old = tuple(map(int, version.split(".")[:2])) < OLDEST_REDIS
    return when(is_old, f"the broker is Redis {version}")


def _find_lost_on_crash(facts: Facts) -> list[Symptom]:
    is_logged = facts.info["aof_enabled"]
    return when(not is_logged and not facts.config["save"], "appendonly is no, and save is empty")


def _find_snapshots(facts: Facts) -> list[Symptom]:
    save = "" if facts.info["aof_enabled"] else facts.config["save"]
    return when(save, f"appendonly is no, and save is {save}")


def _find_eviction(facts: Facts) -> list[Symptom]:
    policy, evicted = facts.info["maxmemory_policy"], facts.info["evicted_keys"]
    text = f"maxmemory-policy is {policy}; {evicted:,} keys were evicted since Redis started"
    return when(policy != "noeviction", text)


def _find_full_memory(facts: Facts) -> list[Symptom]:
    used, limit, name = facts.info["used_memory"], facts.info["maxmemory"], "maxmemory"
    if not limit:
        limit, name = facts.info["total_system_memory"], "its machine's memory"
    # Some managed servers say that their machine has none.
    share = used / limit if limit else 0.0
    text = f"Redis uses {share:.0%} of {name}, which is {limit / 2**20:,.0f} MiB"
    return when(share > limits.MAX_MEMORY_SHARE, text)


def _find_backlog(facts: Facts) -> list[Symptom]:
    waiting = sum(facts.survey.queues.values())
    used, limit = facts.info["used_memory"], facts.info["maxmemory"]
    if waiting < limits.MIN_BACKLOG_JOBS or not limit or not facts.job_bytes:
        return []
    room = max(0, limit - used) / facts.job_bytes
    text = f"{waiting:,} jobs wait, of {facts.job_bytes:,.0f} bytes each; {room:,.0f} more fit"
    return when(room < waiting, text)


def _find_slow_commands(facts: Facts) -> Iterable[Symptom]:
    slow = [
        each
        for each in facts.slow_commands
        if each.took_ms > limits.MAX_COMMAND_MS and each.age_s < limits.SLOW_WINDOW_S
    ]
    for worst in sorted(slow, key=lambda each: each.took_ms)[-1:]:
        text = f"{len(slow)} commands took over {limits.MAX_COMMAND_MS:g} ms; the longest was"
        yield Symptom(f"{text} {worst.name} with {worst.took_ms:,.0f} ms, {worst.age_s:.0f} s ago")


def _find_lagging_replicas(facts: Facts) -> Iterator[Symptom]:
    for number in range(facts.info.get("connected_slaves", 0)):
        replica = facts.info[f"slave{number}"]
        state, lag_s = replica["state"], int(replica.get("lag", 0))
        where = f"replica {replica['ip']}:{replica['port']}"
        yield from when(state != "online", f"{where} is in state {state}")
        yield from when(lag_s > limits.MAX_LAG_S, f"{where} lags {lag_s} s behind")


def _find_lost_writes(facts: Facts) -> list[Symptom]:
    replicas = facts.info.get("connected_slaves", 0)
    is_lone = replicas and facts.config["min-replicas-to-write"] == "0"
    return when(is_lone, f"{replicas} replicas, and min-replicas-to-write is 0")


def _find_crowd(facts: Facts) -> list[Symptom]:
    clients, limit = facts.info["connected_clients"], facts.info["maxclients"]
    refused = facts.info["rejected_connections"]
    text = f"{clients:,} of {limit:,} connections; {refused:,} were refused since Redis started"
    return when(refused or clients > limits.MAX_CLIENTS_SHARE * limit, text)


CHECKS: Mapping[str, Find] = {
    "redis-away": lambda facts: when(facts.redis_problem, facts.redis_problem),
    "redis-version": _find_old_version,
    "redis-cluster": lambda facts: when(
        facts.info["cluster_enabled"], "the broker is a Redis Cluster"
    ),
    "redis-replica": lambda facts: when(
        facts.info["role"] == "slave", f"it is a replica of {facts.info.get('master_host')}"
    ),
    "redis-no-persistence": _find_lost_on_crash,
    "redis-snapshots-only": _find_snapshots,
    "redis-eviction": _find_eviction,
    "redis-memory": _find_full_memory,
    "redis-backlog": _find_backlog,
    "redis-latency": lambda facts: when(
        facts.round_trip_ms > limits.MAX_ROUND_TRIP_MS,
        f"a round trip from here takes {facts.round_trip_ms:.1f} ms",
    ),
    "redis-slow-commands": _find_slow_commands,
    "redis-replica-lag": _find_lagging_replicas,
    "redis-lost-writes": _find_lost_writes,
    "redis-connections": _find_crowd,
    "redis-timeout": lambda facts: when(
        facts.config["timeout"] != "0", f"timeout is {facts.config['timeout']} s"
    ),
    "redis-clock": lambda facts: when(
        abs(facts.redis_ahead_s) > limits.MAX_SKEW_S,
        f"Redis's clock is {facts.redis_ahead_s:+.1f} s off this machine's",
    ),
}
