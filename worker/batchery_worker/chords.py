"""The body of a chord is sent by its last part, also where that part is completed twice.

Celery gives each attempt of the last part a claim of its own, for some seconds. If its worker dies
between the claim and the sending, or the answer to the claim is lost, then the job's next attempt
comes while the claim stands, leaves the sending to it, and nobody sends the body. Here all attempts
of a job have one claim. Two of them at a time do no harm: what a job sends is marked.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from batchery.transport.sending import sending_tag
from batchery_worker.patience import has_run_out

Script = Callable[..., Any]


def share_claims(backend: Any) -> None:
    """Gives all attempts of a job one claim to a chord's body.

    Args:
        backend: Of a thread; the claim's name is the tag of the job that the thread is completing.
    """
    for name, ours in SCRIPTS.items():
        stock = getattr(backend, name, None)
        if stock is not None and not isinstance(stock, partial):
            setattr(backend, name, partial(ours, stock))


def _claim(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    """Counts a part; its last argument is the claim, the fourth of its answers who has it."""
    tag = sending_tag()
    if tag is None:
        return stock(keys=keys, args=args, client=client)
    count, difference, size, claimed = stock(keys=keys, args=[*args[:-1], tag], client=client)
    if size and not claimed and count == int(size) + int(difference or 0):
        held = client.get(keys[-1])
        claimed = int(held in (tag, tag.encode()))
    return count, difference, size, claimed


def _extend(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    return stock(keys=keys, args=[sending_tag() or args[0], *args[1:]], client=client)


def _clean_up(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    if has_run_out():
        # The body was not sent; the job's next attempt needs what would be removed.
        return 1
    return stock(keys=keys, args=[sending_tag() or args[0], *args[1:]], client=client)


#: Celery's scripts, as attributes of its Redis backend, and what takes their place; other backends
#: count parts without them.
SCRIPTS = {
    "_chord_part_return_script": _claim,
    "_chord_claim_extend_script": _extend,
    "_chord_cleanup_script": _clean_up,
}
