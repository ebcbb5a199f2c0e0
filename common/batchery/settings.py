"""Every setting, and the only place that reads the environment.

A setting is looked up as keyword, then `app.conf.batchery_<name>`, then `BATCHERY_<NAME>`, then in
the file that `BATCHERY_SETTINGS_FILE` names, or else `batchery.toml` of the working directory.
Nothing is read before somebody asks for a setting.
"""

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as JsonError

from batchery.broker_url import check_broker_url
from batchery.device_names import check_devices
from batchery.errors import SettingsError
from batchery.gateway_settings import GatewaySettings, KeySettings
from batchery.media_settings import MediaSettings
from batchery.model_settings import ModelSettings
from batchery.priority_class import LOWEST_PRIORITY, PriorityClass

__all__ = ["LOWEST_PRIORITY", "ModelSettings", "PriorityClass", "Settings"]

PREFIX = "BATCHERY_"

TOML_FILE = Path("batchery.toml")

#: Environment variable with the path of the settings file, where it is not `TOML_FILE`.
FILE_VARIABLE = f"{PREFIX}SETTINGS_FILE"


def from_conf(known: Collection[str], conf: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, by name, of the `batchery_<name>` entries of a Celery configuration.

    Raises:
        SettingsError: An entry names no setting; it would be ignored silently.
    """
    # Iterating loads a configuration that Celery loads late; `in` does not.
    keys, found = list(conf), {}
    # An app with a namespace, as in Django projects, spells its settings CELERY_BATCHERY_...
    namespace = str(getattr(conf, "prefix", None) or "")
    for key in keys:
        spelled = key.removeprefix(namespace).lower()
        if not spelled.startswith("batchery_") or isinstance(conf[key], ModuleType):
            continue
        name = spelled.removeprefix("batchery_")
        if name not in known or spelled not in conf:
            raise _unknown(f"app.conf.{key}", spelled, [f"batchery_{each}" for each in known])
        found[name] = conf[spelled]
    return found


def _unknown(where: str, name: str, known: Iterable[str]) -> SettingsError:
    names = sorted(known)
    near = nearest_name(name, names)
    return SettingsError(f"{where}: no such setting{near}; there are {', '.join(names)}")


def nearest_name(name: str, names: Iterable[str]) -> str:
    """How a sentence about an unknown name goes on: with the nearest known one, or not at all."""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f", the nearest is {nearest[0]}" if nearest else ""


class MetricsSettings(BaseModel):
    """Where a worker serves its metrics and its health: the table `[metrics]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on; there is no password."
    )
    port: NonNegativeInt | None = Field(
        None, le=65535, description="Port of `/metrics`, `/livez` and `/readyz`; 0 is any."
    )


class Settings(BaseSettings):
    """All settings of a worker, a producer and the standalone app."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
    )

    redis_url: str | None = Field(
        None,
        description="Redis with the queues of batch jobs, which may be a cluster:"
        " `redis+cluster://host:port,host:port`. If unset, the app's broker; the standalone app"
        " (`batchery.app`) has it as its broker, too, or else `redis://localhost:6379/0`.",
    )
    result_url: str | None = Field(
        None, description="Result backend of the standalone app; `redis_url` if unset."
    )
    result_expires_s: PositiveInt = Field(
        86_400, description="Standalone app: how long a result is kept, in seconds."
    )
    models: dict[str, ModelSettings] = Field(
        {}, description="Built-in models by task name; each is a Celery task and a queue."
    )
    devices: Literal["auto"] | list[str] = Field(
        "auto",
        description="Where batches run: `auto` is every CUDA device, or the CPU;"
        " `cpu:0,cpu:1` are two processes, and `cuda:0+cuda:1` is one device of two cards.",
    )
    max_batch_size: PositiveInt = Field(
        64, description="Maximum items of a batch; a full batch leaves at once."
    )
    max_batch_tokens: PositiveInt | None = Field(
        None, description="Maximum tokens of one forward pass, with padding; by device if unset."
    )
    max_wait_ms: NonNegativeFloat = Field(
        0,
        le=3_600_000,
        description="How long an idle device waits for a batch to fill, from its oldest job.",
    )
    classes: dict[str, PriorityClass] = Field(
        {
            "high": PriorityClass(level=0, share=50),
            "normal": PriorityClass(level=3, share=30),
            "low": PriorityClass(level=6, share=20),
        },
        min_length=1,
        description="Classes of jobs by name, with level and share.",
    )
    target_latency_ms: PositiveFloat | None = Field(
        None, description="How long jobs may take in a worker; batches are only as large as fits."
    )
    shed_late: bool = Field(
        False, description="Fail jobs with `DeadlineExceeded` that cannot make their deadline."
    )
    device_start_timeout_s: PositiveFloat = Field(
        600, description="How long a device may take to load and warm up its models."
    )
    max_pass_s: PositiveFloat | None = Field(
        None,
        description="How long a device with work may give no sign before it is killed, as it"
        " hangs. It must be longer than any batch, or step of a model with slots. If unset, one"
        " that hangs holds its jobs until their hard time limit; without one, for ever.",
    )
    device_max_jobs: PositiveInt | None = Field(
        None,
        description="Jobs after which a device gets a fresh process; never if unset."
        " `--max-tasks-per-child` is for the processes of ordinary tasks.",
    )
    device_max_memory_bytes: PositiveInt | None = Field(
        None,
        description="Main memory of a device's process above which it gets a fresh one; no"
        " limit if unset. It must be more than the models hold.",
    )
    completion_threads: PositiveInt = Field(
        2, le=64, description="Threads of a device for Celery's tracer, and hooks after a job."
    )
    memory_fraction: PositiveFloat = Field(
        1.0, le=1, description="Share of a CUDA device's memory that is used."
    )
    model_memory_bytes: PositiveInt | None = Field(
        None,
        description="Memory of each device for models; others are loaded when they have jobs,"
        " instead of those not used for longest. If unset, nine tenths of what"
        " `memory_fraction` leaves of a CUDA device, and no limit on others.",
    )
    cache_ttl_s: PositiveFloat = Field(
        3_600, description="How long a result is kept for equal items, in seconds."
    )
    stream_max_pieces: PositiveInt = Field(
        10_000, description="Maximum partial results of a job that Redis keeps."
    )
    stream_grace_s: float = Field(
        30, ge=5, le=3600, description="Seconds that a streamed job goes on unread."
    )
    gateway: GatewaySettings = Field(
        GatewaySettings(), description="What `batchery serve` serves, and to whom."
    )
    media: MediaSettings = Field(
        MediaSettings(), description="Where pictures and sound come from, and how much is read."
    )
    metrics: MetricsSettings = Field(
        MetricsSettings(), description="Where a worker serves its metrics and its health."
    )

    @field_validator("redis_url", "result_url")
    @classmethod
    def _url_with_scheme(cls, url: str | None) -> str | None:
        # Other brokers' apps may have none.
        return url and check_broker_url(url)

    @field_validator("devices", mode="before")
    @classmethod
    def _known_devices(cls, value: object) -> object:
        return check_devices(value)

    @field_validator("models")
    @classmethod
    def _one_model_per_name(cls, models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
        names = set(models)
        for model, settings in models.items():
            for alias in settings.aliases:
                if alias in names or not alias or "," in alias or " " in alias:
                    raise ValueError(
                        f"alias {alias!r} of {model!r} is the name of another model, or no name"
                    )
                names.add(alias)
        return models

    @field_validator("classes")
    @classmethod
    def _every_priority_has_one_class(
        cls, classes: dict[str, PriorityClass]
    ) -> dict[str, PriorityClass]:
        levels = sorted(each.level for each in classes.values())
        if len(set(levels)) < len(levels):
            raise ValueError("two classes have the same level; each needs one of its own")
        if levels[0] != 0:
            raise ValueError("no class has level 0, which is the priority of most jobs; give one")
        return classes

    @property
    def shares(self) -> dict[str, float]:
        """Share of each class by its name, highest class first."""
        ordered = sorted(self.classes.items(), key=lambda each: each[1].level)
        return {name: each.share for name, each in ordered}

    def find_class(self, priority: int) -> str:
        """Name of the class of a priority from 0 to `LOWEST_PRIORITY`."""
        levels = {name: each.level for name, each in self.classes.items() if each.level <= priority}
        return max(levels, key=levels.__getitem__)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Ranks the TOML file behind keywords and the environment; reads no other source."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, settings_file())

    @classmethod
    def load(cls, conf: Mapping[str, Any] | None = None, **keywords: Any) -> "Settings":
        """Reads all sources once.

        Args:
            conf: A Celery configuration; its `batchery_<name>` entries rank behind keywords.
            keywords: Settings by name; they rank first.

        Raises:
            SettingsError: A setting is wrong; the text says which, its source, and what is valid.
        """
        found = from_conf(cls.model_fields, conf) if conf is not None else {}
        _refuse_unknown_variables(cls)
        try:
            _refuse_missing_file()
            return cls(**{**found, **keywords})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{settings_file()}: not valid TOML: {error}") from None
        except JsonError as error:
            raise SettingsError(f"environment: {error}: {error.__cause__}") from None
        except OSError as error:
            raise SettingsError(f"{settings_file()}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            raise SettingsError(_explain(error, found, keywords)) from None


_TABLES: tuple[type[BaseModel], ...] = (
    *(Settings, ModelSettings, PriorityClass),
    *(GatewaySettings, KeySettings, MediaSettings, MetricsSettings),
)

#: Names of the settings of all tables.
_ALL_NAMES = {name for table in _TABLES for name in table.model_fields}


def settings_file() -> Path:
    """The file with settings, which need not exist."""
    return Path(os.environ.get(FILE_VARIABLE) or TOML_FILE).expanduser()


def describe_file() -> str:
    """For the log: which file was read, or where there is none."""
    path = settings_file()
    return str(path.absolute()) if path.exists() else f"there is no {path.absolute()}"


def read_secret(variable: str) -> str:
    """The value of a variable that a setting names. Raises SettingsError: it is not set."""
    if value := os.environ.get(variable):
        return value
    raise SettingsError(f"environment variable {variable}: a setting names it; set it")


def _refuse_missing_file() -> None:
    """A file that is named and missing, or is a folder, would be ignored silently."""
    path = settings_file()
    if not path.is_file() and (path.exists() or os.environ.get(FILE_VARIABLE)):
        raise SettingsError(
            f"{path}: there is no such file; make one with settings, remove what is in its place,"
            f" or unset {FILE_VARIABLE}"
        )


def _refuse_unknown_variables(cls: type[Settings]) -> None:
    """A misspelt variable would be ignored silently, and the default would be used."""
    known = {PREFIX + name.upper() for name in cls.model_fields} | {FILE_VARIABLE}
    for variable in os.environ:
        name = variable.upper().split("__")[0]
        if name.startswith(PREFIX) and name not in known:
            raise _unknown(f"environment variable {variable}", name, known)


def _explain(error: ValidationError, found: Mapping[str, Any], keywords: Mapping[str, Any]) -> str:
    """Names the first wrong setting, its value, its source and the problem."""
    errors = error.errors()
    # What is missing may have been misspelt.
    misspelt = (each for each in errors if each["type"] == "extra_forbidden")
    first = next(misspelt, errors[0]) if errors[0]["type"] == "missing" else errors[0]
    path = [str(part) for part in first["loc"] if "[" not in str(part)]
    name = path[0] if path else "settings"
    # A missing setting is looked up by its parent, which exists.
    place = path[:-1] if first["type"] == "missing" else path
    if _has(keywords, place):
        source = "a keyword of install()"
    elif _has(found, place):
        source = f"app.conf.batchery_{name}"
    elif variable := _variable(place):
        source = f"environment variable {variable}"
    else:
        source = str(settings_file())
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        problem = "no such setting" + nearest_name(path[-1], _ALL_NAMES)
    # A URL may hold a password.
    is_shown = first["type"] not in ("missing", "extra_forbidden") and "@" not in str(
        first["input"]
    )
    given = f" = {first['input']!r}" if is_shown else ""
    return f"setting {'.'.join(path)}{given} (from {source}): {problem}"


def _has(values: Any, path: Sequence[str]) -> bool:
    """Whether a source has this path; sources are merged, down to the settings of one model."""
    if not path or not isinstance(values, Mapping):
        return bool(path == [] or values)
    return path[0] in values and _has(values[path[0]], path[1:])


def _variable(path: Sequence[str]) -> str | None:
    """The environment variable that sets this path, if there is one."""
    there = {variable.upper(): variable for variable in os.environ}
    for length in range(len(path), 0, -1):
        variable = there.get(PREFIX + "__".join(path[:length]).upper())
        if variable is not None:
            return variable
    return None
