"""For how long jobs have waited that do not say when they were sent, as those of plain clients."""

import time
from collections.abc import Callable
from dataclasses import replace

from batchery.cli.survey import Survey


class FirstSeen:
    """Remembers when such a job was first seen next in turn in its queue. Pure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By queue and id; only of the jobs of the last survey.
        self._seen_s: dict[tuple[str, bytes], float] = {}

    def date(self, survey: Survey) -> Survey:
        """The survey with the ages of these jobs, which may be older: they had other turns before.

        Args:
            survey: Later than the one before.
        """
        now_s = self._clock()
        heads = [(queue, id_) for queue, ids in survey.undated.items() for id_ in ids]
        self._seen_s = {head: self._seen_s.get(head, now_s) for head in heads}
        oldest_s = {**survey.oldest_s}
        for (queue, _), seen_s in self._seen_s.items():
            oldest_s[queue] = max(oldest_s.get(queue) or 0.0, now_s - seen_s)
        return replace(survey, oldest_s=oldest_s)
