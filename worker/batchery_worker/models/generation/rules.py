"""What a generation config says of tokens: by transformers' own processors, or refused by name."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from batchery_worker.models.generation.texts import Prompt, SlotText
from batchery_worker.models.inputs import GenerationKeywords
from batchery_worker.models.source import ModelSource

#: Fields of transformers' `GenerationConfig` that change texts by other means than processors, and
#: which no engine of ours has -> the values with which they change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("constraints", "dola_layers", "force_words_ids"), (None,)),
    **dict.fromkeys(("forced_decoder_ids", "stop_strings", "watermarking_config"), (None,)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "token_healing"), (None, 0, False)),
    "guidance_scale": (None, 1),
}

#: Fields that transformers makes processors of.
PROCESSORS = frozenset(
    """
    bad_words_ids begin_suppress_tokens encoder_no_repeat_ngram_size encoder_repetition_penalty
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id min_length
    min_new_tokens no_repeat_ngram_size remove_invalid_values renormalize_logits repetition_penalty
    sequence_bias suppress_tokens
    """.split()  # noqa: SIM905
)

#: Other fields of `GenerationConfig` of transformers 5.23, and why they change no text here.
HARMLESS = {
    "it is known where texts begin and end": """
        bos_token_id decoder_start_token_id eos_token_id pad_token_id
    """,
    "jobs and settings say how texts are drawn, how many there are, and how long they are": """
        do_sample epsilon_cutoff eta_cutoff min_p temperature top_h top_k top_p typical_p
        num_return_sequences max_length max_new_tokens max_time
    """,
    "docs/generation.md says that no beams are searched": """
        early_stopping length_penalty low_memory num_beam_groups num_beams
    """,
    "it is computed in another way, with the same outcome": """
        assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
        assistant_lookbehind is_assistant max_matching_ngram_size num_assistant_tokens
        num_assistant_tokens_schedule prompt_lookup_num_tokens speculation_type target_lookbehind
        use_mtp cache_config cache_implementation compile_config continuous_batching_config
        disable_compile max_cache_len prefill_chunk_size use_cache
    """,
    "it says what is told of a text, or of the file": """
        output_attentions output_hidden_states output_logits output_scores return_dict_in_generate
        _from_model_config transformers_version _commit_hash _original_object_hash
    """,
}

#: Any other field is refused where a model sets it.
KNOWN = PROCESSORS.union(" ".join(HARMLESS.values()).split())


class Rules:
    """The processors of one model's texts, as `generate` would make them.

    Attributes:
        hold: Whether the model has any besides a repetition penalty, which `Sampling` knows.
    """

    def __init__(self, model: Any, source: ModelSource) -> None:
        """Reads the generation config of a model of transformers.

        Raises:
            ValueError: It asks for what cannot be honoured; names the field.
        """
        self._model = model
        # An encoder's prompt is no part of its text.
        self._start = [start_token(model)] if model.config.is_encoder_decoder else []
        # Without that file, transformers looks into the other one.
        file = "generation_config.json"
        asked = source.json(file)
        if asked is None:
            file, asked = "config.json", vars(model.generation_config)
        for field, value in asked.items():
            if field not in KNOWN and value not in REFUSED.get(field, (None,)):
                raise ValueError(
                    f"{file} has {field} = {value!r:.80}, which may change its texts and is not"
                    " supported; take it away"
                )
        if "generate" in vars(model):
            raise ValueError(
                "custom_generate/generate.py writes its texts in another way, which is not"
                " supported; take it away"
            )
        none = GenerationKeywords(repetition_penalty=1.0)
        self.hold = bool(self.read(Prompt([0], none, 1))) or bool(self._start)

    def read(self, prompt: Prompt) -> LogitsProcessorList:
        """The processors of a job's texts."""
        before, penalty = self._start or prompt.tokens, prompt.options.repetition_penalty
        own = {} if penalty is None else {"repetition_penalty": penalty}
        config, _ = self._model._prepare_generation_config(
            None, do_sample=False, num_beams=1, max_new_tokens=prompt.max_new_tokens, **own
        )
        device = self._model.device
        self._model._prepare_special_tokens(config, device=device)
        # What the lengths of texts and those of new tokens alone make of each other.
        self._model._prepare_generated_length(config, True, True, "input_ids", len(before), None)
        found: LogitsProcessorList = self._model._get_logits_processor(
            config,
            input_ids_seq_length=len(before),
            encoder_input_ids=torch.tensor([prompt.tokens], device=device) if self._start else None,
            device=device,
        )
        return found

    def apply(self, text: SlotText, logits: Tensor) -> Tensor:
        """What a text's own processors make of its logits, both (V,)."""
        known = [*(self._start or text.prompt.tokens), *text.tokens]
        read = torch.tensor([known], device=logits.device)
        changed: Tensor = text.rules(read, logits[None])[0]
        return changed


def start_token(model: Any) -> int:
    """The token with which the decoder begins.

    Raises:
        ValueError: The model's files do not say.
    """
    defaults = model.generation_config
    for token in (defaults.decoder_start_token_id, defaults.bos_token_id):
        if token is not None:
            return int(token)
    raise ValueError(
        "its files have no decoder_start_token_id, so that it is unknown with what texts begin;"
        " write it into generation_config.json"
    )
