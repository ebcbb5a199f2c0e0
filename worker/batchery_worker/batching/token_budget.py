"""How many tokens one forward pass may have, learned from passes that ran out of memory: pure.

A pass that runs out of memory costs its time twice, so the budget of its model falls at once: to
what is known to fit, or to half. Then it closes in on the limit by halves, and long after that it
tries again what failed: what took the memory may be gone.
"""

#: Gap between the budget and what fails, as a divisor of the budget, that is not worth closing: 6 %
#: of throughput at worst.
GAP_DIVISOR = 16

#: Passes of about the budget that must fit before it grows towards what fails.
GROWTH_PASSES = 8

#: Passes that must fit before the budget tries again what failed: at most one pass in so many
#: fails for it. Doubled after each failed attempt, up to the maximum.
RECOVERY_PASSES = 256
MAX_RECOVERY_PASSES = 4096

#: Growth of such an attempt, as a divisor of the budget.
RECOVERY_DIVISOR = 8


class TokenBudget:
    """The tokens that one forward pass of a model may have."""

    def __init__(self, ceiling: int) -> None:
        """Starts at the ceiling.

        Args:
            ceiling: Maximum number of tokens in any case, at least 1: the setting, or the default
                of the device.
        """
        self.ceiling = ceiling
        #: Maximum tokens that fitted, and minimum tokens that did not; 0 if unknown.
        self._fits = 0
        self._fails = 0
        #: The budget while something is known to fail.
        self._limit = 0
        self._calm_passes = 0
        self._recovery_passes = RECOVERY_PASSES

    def allows(self) -> int:
        """Maximum number of tokens of the next pass, at least 1."""
        return min(self.ceiling, self._limit) if self._fails else self.ceiling

    def failed(self, tokens: int) -> None:
        """A pass of so many tokens ran out of memory."""
        tokens = max(1, tokens)
        if self._fails and tokens >= self._fails:
            # A lone item is longer than the budget: that says nothing about the budget.
            return
        if self._is_close and self._fails:
            self._recovery_passes = min(2 * self._recovery_passes, MAX_RECOVERY_PASSES)
        if self._fits >= tokens:
            # There was more memory then, or the shape was different.
            self._fits = tokens // 2
        self._fails = tokens
        self._limit = max(1, self._fits, tokens // 2)
        self._calm_passes = 0

    def passed(self, tokens: int) -> None:
        """A pass of so many tokens fitted."""
        if tokens > self.allows():
            return
        self._fits = max(self._fits, tokens)
        if not self._fails or tokens < self._limit * 3 // 4:
            return
        self._calm_passes += 1
        if self._calm_passes >= (self._recovery_passes if self._is_close else GROWTH_PASSES):
            self._calm_passes = 0
            self._grow()

    @property
    def _is_close(self) -> bool:
        return self._fails - self._limit <= max(1, self._limit // GAP_DIVISOR)

    def _grow(self) -> None:
        if not self._is_close:
            self._limit = (self._limit + self._fails) // 2
            return
        self._limit += max(1, self._limit // RECOVERY_DIVISOR)
        self._fails = max(self._fails, self._limit + 1)
        if self._limit >= self.ceiling:
            # All of it fits again.
            self._fails = 0
            self._recovery_passes = RECOVERY_PASSES
