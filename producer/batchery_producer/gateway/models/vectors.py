"""Vectors as workers send them: float32, little-endian, in base64."""

import base64

import numpy as np

#: The smallest number that a vector's length is divided by.
LEAST_NORM = 1e-12

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


def numbers(vector: str) -> Vector:
    """The numbers of a vector in base64; orjson writes them with the fewest digits."""
    return np.frombuffer(base64.b64decode(vector), dtype="<f4").astype(np.float32, copy=False)


def shorten(vector: str, dimensions: int, *, scale: bool) -> str:
    """Keeps the leading dimensions of a vector in base64.

    Args:
        vector: In base64.
        dimensions: How many it keeps.
        scale: Whether what is kept gets length 1.

    Raises:
        ValueError: It has fewer.
    """
    whole = numbers(vector)
    if len(whole) < dimensions:
        raise ValueError(f"dimensions = {dimensions}: the model's vectors have {len(whole)}")
    kept = whole[:dimensions]
    if scale:
        kept = kept / max(float(np.linalg.norm(kept)), LEAST_NORM)
    return base64.b64encode(kept.astype("<f4").tobytes()).decode("ascii")
