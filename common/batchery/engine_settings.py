"""What computes a model, and what goes with it; part of each table `[models.NAME]`."""

from typing import Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

#: The kinds of model that an engine is for; `transformers` is for all.
ENGINE_KINDS = {
    "openai": ("generation",),
    "vllm": ("generation",),
    "onnx": ("embedding", "classification", "rerank"),
}

#: Settings that an ONNX file decides: the values that they may have, and what to do instead.
DECIDED_BY_FILE = {
    "dtype": (("auto",), "the file has its number format; set onnx_file to another one"),
    "quantize": (("none",), "set onnx_file to a quantized one"),
    "forward": (("auto", "padded"), "it cannot be packed"),
}


class EngineSettings(BaseModel):
    """The engine, and the file of engine onnx. Both are read before the settings of a model."""

    engine: Literal["transformers", "openai", "vllm", "onnx"] = Field(
        "transformers",
        description="What computes; `openai` and `vllm` are for generation, `onnx` for"
        " embedding, classification and rerank.",
    )
    onnx_file: str | None = Field(
        None,
        min_length=1,
        description="Engine onnx: the file in the model's folder; `onnx/model.onnx` or"
        " `model.onnx` if unset.",
    )

    @field_validator("kind", check_fields=False)
    @classmethod
    def _kind_of_the_engine(cls, kind: str, info: ValidationInfo) -> str:
        engine = info.data.get("engine", "transformers")
        kinds = ENGINE_KINDS.get(engine, (kind,))
        if kind not in kinds:
            raise ValueError(
                f"engine = {engine!r} is for {', '.join(kinds)} alone; leave engine out for others"
            )
        return kind

    @field_validator(*DECIDED_BY_FILE, check_fields=False)
    @classmethod
    def _nothing_that_the_file_decides(cls, value: str, info: ValidationInfo) -> str:
        values, hint = DECIDED_BY_FILE[str(info.field_name)]
        if info.data.get("engine") == "onnx" and value not in values:
            raise ValueError(f"engine = 'onnx' takes {' or '.join(values)}: {hint}")
        return value
