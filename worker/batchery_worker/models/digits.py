"""Numbers as short as they are exact: nine digits tell any two float32 apart.

Written out as the float64 that it becomes in Python, a float32 has seventeen digits or so, of which
half say nothing.
"""

import numpy as np
from numpy.typing import NDArray

#: Significant digits that every float32 survives.
DIGITS = 9


def shortened(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rounds to nine significant digits.

    Args:
        values: Of any shape.

    Returns:
        The same shape. Cast to float32, each number is the one that was given, to the last bit;
        written out, it is a third shorter. What is not finite stays so.
    """
    exact = values.astype(np.float64)
    # Zero has no logarithm, and infinity no digits.
    with np.errstate(divide="ignore", invalid="ignore"):
        places = DIGITS - 1 - np.floor(np.log10(np.abs(exact)))
    usual = np.isfinite(places)
    scale = np.power(10.0, np.where(usual, places, 0.0))
    return np.where(usual, np.rint(exact * scale) / scale, exact)
