"""The contract of a model: four methods, of which three run for every batch.

```python
class Sentiment(batchery.Model):
    def load(self, device):
        import transformers  # only the device process pays for it
        self.pipe = transformers.pipeline("sentiment-analysis", device=device)

    def forward(self, batch):
        return self.pipe(batch, batch_size=len(batch))

batchery.register(app, "sentiment", Sentiment)
```
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Model:
    """Base class of models.

    One instance at a time lives in each device process. Keywords of a job are passed to all three
    stages, so that a model without keywords writes `def preprocess(self, items)` and one with
    `top_k` writes `def postprocess(self, outputs, top_k=1)` and ignores it in the others with
    `**_`.

    Attributes:
        pads: Whether `forward` fills items up to the longest of a micro-batch. Then it costs as
            many tokens as the longest item has, times the items; otherwise the sum of them.
        memory_bytes: Memory that it holds once it is loaded; for `load` to set, where a worker sees
            nothing of it. None for what its modules of torch hold.
    """

    pads = True
    memory_bytes: int | None = None

    def load(self, device: str) -> None:
        """Loads weights onto the device; called once, before any batch.

        Args:
            device: As torch spells it: `cpu`, `cuda:0`.

        Raises:
            ModelLoadError: With what to do about it; the worker stops with exit code 2.
        """

    def identity(self) -> str:
        """What its results depend on, besides item, keywords and `cache`: its weights, its options.

        Asked once, after `load`, and only if the task has a `cache`. Results are shared by all
        models of one task and one `cache` that say the same here.
        """
        return ""

    def version(self) -> str:
        """A short name for what `load` has loaded; `batchery explain` and `batchery stats` show it.

        Asked once, after `load`. Empty if it has none.
        """
        return ""

    def unload(self) -> None:
        """Frees what `load` took, besides memory: once, after the last batch.

        Called when a `batchery.Engine` is closed, and when a worker needs the memory for another
        model. Jobs then get a new instance. A device process that ends does not call it.
        """

    def warm_up(self) -> Sequence[Any]:
        """Items that are run once after `load`, before the worker says that it is ready."""
        return ()

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Sequence[Any]:
        """Validates and prepares, on a thread beside the running forward pass.

        Args:
            items: The items of one batch, as they were submitted.
            keywords: The keywords that all of these jobs share.

        Returns:
            One prepared item per item, in order; `Failed` for each that is not fit to run, so that
            its batch mates never notice.
        """
        return items

    def tokens(self, prepared: Any) -> int:
        """How much of the token budget a prepared item takes, at least 1: its length in tokens."""
        return 1

    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
        """Runs the model, on the main thread of the device process, the only one to touch CUDA.

        Args:
            batch: Prepared items of one micro-batch: sorted by `tokens`, longest first, and within
                `max_batch_tokens`, counted as `pads` says.
            keywords: As in `preprocess`.

        Returns:
            Anything that `postprocess` understands.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward method")

    def postprocess(self, outputs: Any, *_: Any, **keywords: Any) -> Sequence[Any]:
        """Turns the outputs of one forward pass into one outcome per item, in the batch's order."""
        return list(outputs)


#: In `Advance.outcome`: the item goes on.
GOES_ON: Any = object()


class Advance(NamedTuple):
    """What one step did for one item."""

    #: As it was given to `StepModel.join`.
    slot: int
    #: A partial result that JSON can write, for those who stream; None for none.
    piece: Any = None
    #: A value or `Failed`: the item has ended, and its slot is free. `GOES_ON` if it has not.
    outcome: Any = GOES_ON


class StepModel(Model):
    """Base class of models whose items join and leave a batch that is running.

    Text generation is the example: texts end at different times, and a batch that waits for its
    longest text wastes most of the device. Items sit in slots, each `step` takes all of them a step
    further, and a job is answered as soon as its item ends. Jobs with different keywords share the
    steps, as each item has its own. All methods but `preprocess` run on the main thread of a device
    process, which such a task has for itself.

    Attributes:
        slots: Maximum number of items at once; an option `slots` of the task outranks it.
        is_streamed: Whether anybody gets the pieces of the item that joins; set before each `join`.
        resumes: Whether an item that has left goes on after its pieces, which costs little. Then a
            job of a higher class may take its slot, and it goes on later.
    """

    slots = 16
    is_streamed = True
    resumes = False

    def join(self, slot: int, prepared: Any, pieces: Sequence[Any], **keywords: Any) -> None:
        """Takes an item in; it is part of all steps from now on.

        Args:
            slot: A number that no other item has now.
            prepared: From `preprocess`.
            pieces: What was made of it already, where a process that ran it has died, or another
                item took its slot. It goes on after them. Empty for an item that is new.
            keywords: The keywords of its job.

        Raises:
            Exception: Whatever is wrong with this item or its keywords; it fails alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no join method")

    def leave(self, slot: int) -> Sequence[Any] | None:
        """Drops an item, because nobody wants it any more, or another one needs its slot.

        Returns:
            Pieces that no step has told: with them it goes on where it was. None for none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no leave method")

    def step(self) -> Sequence[Advance]:
        """Takes all items a step further.

        It must not wait for long: between two steps items join, leave, and reach their limits. If
        the memory is short, it must drop none of them. Any error that it raises ends the process,
        and its jobs run again.

        Returns:
            What became of the items, in any order; items of which nothing is to be said are left
            out. `Advance.outcome` ends an item, which has left by then.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step method")
