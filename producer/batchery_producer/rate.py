"""Rates over the last seconds. Pure: time is an argument."""

from collections import deque

#: What "now" means for a rate, in seconds: shorter jumps with every batch, longer hides a change.
SPAN_S = 15.0

#: Least time between two samples, in seconds; bounds how many are kept.
SAMPLE_S = 0.5


class Rate:
    """How fast a count grows."""

    def __init__(self, now_s: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now_s, 0)])

    def per_second(self, now_s: float, count: int) -> float:
        """Notes the count, and says how much it has grown per second lately.

        Args:
            now_s: Time in seconds, from any start; never less than at the call before.
            count: What is counted, in all.
        """
        samples = self._samples
        start_s, before = samples[0]
        if now_s - samples[-1][0] >= SAMPLE_S:
            samples.append((now_s, count))
            while len(samples) > 2 and now_s - samples[1][0] >= SPAN_S:
                samples.popleft()
        return (count - before) / (now_s - start_s) if now_s > start_s else 0.0
