"""What the kinds of model have in common that put prompts in front of texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchery.errors import InvalidItem, ModelLoadError
from batchery_worker.models.keywords import PromptKeywords
from batchery_worker.models.loading.source import ModelSource
from batchery_worker.models.text_model import TextModel


class PromptedModel(TextModel):
    """A model whose jobs may choose a prompt by its name.

    Prompts come from the settings and from the model's own files; the settings win.
    """

    prompts: Mapping[str, str]
    default_prompt: str | None

    def _keep_encoder(self, source: ModelSource, missing: Sequence[str]) -> None:
        """Leaves of a model what makes vectors of tokens.

        Raises:
            ModelLoadError: Some of its weights are missing.
        """
        # The pooler follows the token vectors. It is not used, and often missing.
        lost = [key for key in missing if "pooler" not in key.split(".")]
        if lost:
            raise ModelLoadError(
                f"model {source.name!r}: its checkpoint lacks {len(lost)} of its weights"
                f" ({', '.join(lost[:2])}); the weights are of another model than config.json"
            )
        if self.model.config.is_encoder_decoder:
            self.model = self.model.get_encoder()

    def _take_prompts(
        self, source: ModelSource, prompts: Mapping[str, str], default: str | None
    ) -> None:
        """Keeps the prompts of the model's files, and those of the settings.

        Raises:
            ModelLoadError: The default prompt is none of them.
        """
        self.prompts = {**prompts, **self.settings.prompts}
        self.default_prompt = self.settings.default_prompt or default
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ModelLoadError(
                f"model {source.name!r}: default_prompt = {self.default_prompt!r}, but there"
                f" {_are(self.prompts)}"
            )

    def _check_prompt(self, options: PromptKeywords) -> None:
        """Raises InvalidItem if there is no such prompt."""
        if options.prompt is not None and options.prompt not in self.prompts:
            raise InvalidItem(
                f"keyword prompt = {options.prompt!r:.80}: there {_are(self.prompts)}"
            )

    def _prompt(self, options: Any) -> str:
        name = self.default_prompt if options.prompt is None else options.prompt
        return "" if name is None else self.prompts[name]


def _are(prompts: Mapping[str, str]) -> str:
    return f"are {', '.join(sorted(prompts))}" if prompts else "are no prompts"
