"""How often results are looked for that nobody announces. Pure."""

#: Shortest and longest pause between two sweeps, in seconds: what one job alone waits for its
#: result at most, and how often a display has something new to show.
SHORTEST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.25

#: Part of the jobs in flight that should end between two sweeps. Less costs more sweeps per result;
#: more lets the queue run dry before the window is filled again.
SHARE_PER_SWEEP = 1 / 8

#: How much longer a pause is than the sweep before it, at least, where results are announced:
#: sweeps are there for the few that are not.
REST_PER_SWEEP = 9.0

#: Longest pause, in seconds, whatever a sweep takes: it includes what is done with its results.
LONGEST_REST_S = 2.0


class Pace:
    """How long to wait between two sweeps: long enough to find many results, never idle long.

    The time between sweeps follows the rate at which they find results. While they find none the
    pauses grow.
    """

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S
        self._rate: float | None = None

    def pause_s(
        self, *, in_flight: int, found: int, announced: int, since_s: float, sweep_s: float
    ) -> float:
        """How long to wait after a sweep, in seconds.

        Args:
            in_flight: Jobs that are still awaited.
            found: Results that the sweep found.
            announced: Results that came otherwise since the sweep before.
            since_s: Time since the sweep before, in seconds.
            sweep_s: What this one took: at most half of the time is spent asking.
        """
        if found:
            rate = found / max(since_s, SHORTEST_PAUSE_S)
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._pause_s = in_flight * SHARE_PER_SWEEP / self._rate
        elif announced:
            self._pause_s = LONGEST_PAUSE_S
        else:
            self._pause_s *= 1.5
        self._pause_s = min(max(self._pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        rests = announced and announced >= found
        rest_s = min(sweep_s * (REST_PER_SWEEP if rests else 1.0), LONGEST_REST_S)
        return max(self._pause_s, rest_s)
