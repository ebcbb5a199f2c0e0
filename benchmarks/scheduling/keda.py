"""What KEDA and Kubernetes make of a ScaledObject: how many pods there should be. Pure.

KEDA looks at each polling whether anything is above zero: it starts the first pod, and stops the
last one after the cooldown. In between the HorizontalPodAutoscaler decides: the larger wish of both
triggers, but none for a change of less than a tenth; up at most to the double or by four pods, and
down only to the most that it wished for within the stabilization window, some pods in each period;
the window upwards does the same with the fewest.
"""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import yaml

#: Where the chart is rendered with its default values; a test keeps the two the same.
OPERATORS = (
    Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "operators" / "operators.yaml"
)

#: Kubernetes' defaults: how far a ratio may be from 1, how often the autoscaler looks, and what it
#: may add each time.
TOLERANCE = 0.1
SYNC_S = 15.0
MAX_ADDED = 4


@dataclass(frozen=True, slots=True)
class Scaling:
    """The numbers of a ScaledObject; times in seconds."""

    min_replicas: int = 0
    max_replicas: int = 4
    polling_s: float = 10.0
    cooldown_s: float = 600.0
    stabilization_s: float = 600.0
    #: The same upwards: the fewest pods that were wished for lately.
    up_window_s: float = 20.0
    #: Maximum number of pods that go in a period.
    step_pods: int = 1
    step_s: float = 60.0
    #: Thresholds: unfinished jobs for each pod, and age of the oldest job.
    jobs_per_replica: float = 16.0
    oldest_s: float = 10.0


def read_scaling(path: Path = OPERATORS) -> Scaling:
    """Reads the ScaledObject among rendered manifests."""
    [spec] = [
        each["spec"]
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if each and each["kind"] == "ScaledObject"
    ]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    down = behavior["scaleDown"]
    [policy] = down["policies"]
    jobs, oldest = (float(each["metadata"]["threshold"]) for each in spec["triggers"])
    return Scaling(
        spec["minReplicaCount"],
        spec["maxReplicaCount"],
        spec["pollingInterval"],
        spec["cooldownPeriod"],
        down["stabilizationWindowSeconds"],
        behavior["scaleUp"]["stabilizationWindowSeconds"],
        policy["value"],
        policy["periodSeconds"],
        jobs,
        oldest,
    )


class Autoscaler:
    """KEDA's operator and the HorizontalPodAutoscaler, for one Deployment."""

    def __init__(self, scaling: Scaling, replicas: int) -> None:
        """Has wished for nothing yet.

        Args:
            scaling: What is set.
            replicas: Pods that there are.
        """
        self.replicas = replicas
        self._scaling = scaling
        self._active_s = 0.0
        #: Time and number of what was wished for lately, and of the pods that went.
        self._wishes: deque[tuple[float, int]] = deque()
        self._gone: deque[tuple[float, int]] = deque()

    def poll(self, now_s: float, jobs: float, oldest_s: float) -> None:
        """KEDA: from zero to one, and back.

        Args:
            now_s: The time.
            jobs: Unfinished ones.
            oldest_s: Age of the oldest job that was not begun.
        """
        if jobs > 0 or oldest_s > 0:
            self._active_s = now_s
            self.replicas = max(self.replicas, 1)
        elif not self._scaling.min_replicas and now_s - self._active_s > self._scaling.cooldown_s:
            self.replicas = 0

    def sync(self, now_s: float, jobs: float, oldest_s: float, ready: int) -> None:
        """The HorizontalPodAutoscaler; idle at zero.

        Args:
            now_s: The time.
            jobs: Unfinished ones.
            oldest_s: Age of the oldest job that was not begun.
            ready: Pods that have loaded their models.
        """
        if not self.replicas:
            self._wishes.clear()
            return
        scaling, current = self._scaling, self.replicas
        lowest = max(1, scaling.min_replicas)
        wish = min(scaling.max_replicas, max(lowest, self._wish(jobs, oldest_s, ready)))
        _forget(self._wishes, now_s - scaling.stabilization_s)
        self._wishes.append((now_s, wish))
        up_s = now_s - scaling.up_window_s
        higher = min(count for wished_s, count in self._wishes if wished_s >= up_s)
        if higher > current:
            self.replicas = min(higher, max(2 * current, current + MAX_ADDED))
            return
        _forget(self._gone, now_s - scaling.step_s)
        may_go = scaling.step_pods - sum(count for _, count in self._gone)
        stable = min(current, max(count for _, count in self._wishes))
        if going := min(current - stable, may_go):
            self._gone.append((now_s, going))
            self.replicas = current - going

    def _wish(self, jobs: float, oldest_s: float, ready: int) -> int:
        """The larger wish: by jobs an average for each pod, by age a multiple of the ready pods."""
        scaling, current = self._scaling, self.replicas
        by_jobs = by_age = current
        if abs(jobs / (scaling.jobs_per_replica * current) - 1) > TOLERANCE:
            by_jobs = math.ceil(jobs / scaling.jobs_per_replica)
        if abs(oldest_s / scaling.oldest_s - 1) > TOLERANCE:
            by_age = math.ceil(oldest_s / scaling.oldest_s * ready)
        return max(by_jobs, by_age)


def _forget(notes: deque[tuple[float, int]], until_s: float) -> None:
    while notes and notes[0][0] <= until_s:
        notes.popleft()
