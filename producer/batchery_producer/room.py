"""Room in a queue that may hold a limited number of jobs: when will there be some? Pure."""

#: Shortest and longest time after which to ask again, in seconds: a worker takes a few milliseconds
#: for a batch, and a caller wants to hear within some seconds that nothing moves.
SHORTEST_S = 0.01
LONGEST_S = 5.0

#: What is answered while nobody knows how fast jobs are taken, in seconds.
UNKNOWN_S = 1.0


class Room:
    """Learns from the queue's lengths how fast jobs are taken."""

    def __init__(self) -> None:
        self._seen: tuple[float, int] | None = None
        self._per_s: float | None = None

    def saw(self, now_s: float, length: int, pushed: int) -> None:
        """Notes how long the queue is.

        Args:
            now_s: When.
            length: Messages in it.
            pushed: How many of them are new since the last time.
        """
        if self._seen is not None:
            then_s, before = self._seen
            taken = before + pushed - length
            if now_s - then_s < SHORTEST_S:
                # Too close to tell: what was pushed counts at the next time.
                self._seen = then_s, before + pushed
                return
            self._per_s = max(taken, 0) / (now_s - then_s)
        self._seen = now_s, length

    def retry_after_s(self, wanted: int) -> float:
        """When there may be room for so many jobs, in seconds."""
        if self._per_s is None:
            return UNKNOWN_S
        if self._per_s == 0:
            return LONGEST_S
        return min(max(wanted / self._per_s, SHORTEST_S), LONGEST_S)
