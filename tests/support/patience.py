"""How long tests wait before they give up: on slow machines, all of them longer.

A limit only ends a test that would hang. None of them is measured, so one that is too long costs
nothing, and one that is too short fails where the machine has other work.
"""

import os

#: By what all limits are multiplied; `.ci/run` sets it.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """A limit in seconds, longer where the machine is said to be slow."""
    return seconds * PATIENCE


#: How long most tests wait for what should come at once, in seconds.
TIMEOUT_S = patient(60)
