"""The models of the settings, as requests name them, and their vectors."""

import base64
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from batchery.settings import ModelSettings
from batchery_producer.gateway.problems import Kind, Problem

#: Items in one message of a request with several: few enough that several devices share a request,
#: and so many that a message costs little per item.
ITEMS_PER_JOB = 8


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may ask for.

    Attributes:
        name: Name of the model and its task.
        settings: What the settings say of it.
    """

    name: str
    settings: ModelSettings

    @property
    def kind(self) -> str:
        """What it does, such as `embedding`."""
        return self.settings.kind

    @property
    def queue(self) -> str:
        """The queue of its jobs."""
        return self.settings.queue or self.name

    def is_own_name(self, name: str | None) -> bool:
        """Whether a name is this model's own, and no other one's in whose place it is served.

        Own names are that of the settings, the id on the hub, and the end of that id.
        """
        id_ = self.settings.model
        return name in (None, self.name, id_, id_.rstrip("/").rpartition("/")[2])


class ServedModels:
    """All models of the settings."""

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._models = {name: ServedModel(name, settings) for name, settings in models.items()}
        self._by_alias = {
            alias: model for model in self._models.values() for alias in model.settings.aliases
        }

    def __iter__(self) -> Iterator[ServedModel]:
        """In the order of the settings."""
        return iter(self._models.values())

    def find(self, name: str | None, kinds: Collection[str] | None = None) -> ServedModel:
        """The model of a name or alias; without a name, the first one of these kinds.

        Args:
            name: Name or alias.
            kinds: Kinds that fit; None if all do.

        Raises:
            Problem: There is none; the text names those that there are.
        """
        model = None
        if name is not None:
            model = self._models.get(name) or self._by_alias.get(name)
            if model is not None and (kinds is None or model.kind in kinds):
                return model
        there = [each.name for each in self if kinds is None or each.kind in kinds]
        if name is None and there:
            return self._models[there[0]]
        kind_names = " or ".join(sorted(kinds or ()))
        if model is not None:
            what = f"model {name!r:.100}: is of kind {model.kind}, not {kind_names}"
        else:
            what = "no model" if name is None else f"model {name!r:.100}: no such model"
            what += f" of kind {kind_names}" if kind_names else ""
        names = ", ".join(there) or "none; see [models] in the settings"
        raise Problem(
            Kind.NOT_FOUND if name is not None and model is None else Kind.UNSUPPORTED,
            f"{what}; there are: {names}",
            code="model_not_found",
            param="model",
        )


# Their vectors, as workers send them: float32, little-endian, in base64


#: The smallest number that a vector's length is divided by.
LEAST_NORM = 1e-12

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]

#: A vector in an answer, which the schema has as a list of numbers.
Numbers = Annotated[
    Vector, GetPydanticSchema(lambda *_: core_schema.list_schema(core_schema.float_schema()))
]


def numbers(vector: str) -> Vector:
    """The numbers of a vector in base64; orjson writes them with the fewest digits."""
    return np.frombuffer(base64.b64decode(vector), dtype="<f4").astype(np.float32, copy=False)


def shorten(vector: str, dimensions: int, *, scale: bool) -> str:
    """Keeps the leading dimensions of a vector in base64.

    Raises:
        ValueError: It has fewer.
    """
    whole = numbers(vector)
    if len(whole) < dimensions:
        raise ValueError(f"dimensions = {dimensions}: the model's vectors have {len(whole)}")
    kept = whole[:dimensions]
    if scale:
        kept = kept / max(float(np.linalg.norm(kept)), LEAST_NORM)
    return in_base64(kept)


def in_base64(vector: Any) -> str:
    """The numbers of a list or an array, as workers send them."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")
