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
from typing import Any


class Model:
    """Base class of models.

    One instance lives in each device process. Keywords of a job are passed to all three stages, so
    that a model without keywords writes `def preprocess(self, items)` and one with `top_k` writes
    `def postprocess(self, outputs, top_k=1)` and ignores it in the others with `**_`.

    Attributes:
        pads: Whether `forward` fills items up to the longest of a micro-batch. Then it costs as
            many tokens as the longest item has, times the items; otherwise the sum of them.
    """

    pads = True

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

    def unload(self) -> None:
        """Frees what `load` took, besides memory; called once, when a `batchery.Engine` is closed.

        A device process of a worker just ends.
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
