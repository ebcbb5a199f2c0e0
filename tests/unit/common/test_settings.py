"""Where settings come from, and what is said of wrong ones."""

import os
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery

from batchery import ModelSettings, Settings, SettingsError, install
from batchery.installation import get_installation


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, and no variable of ours."""
    for name in list(os.environ):
        if name.upper().startswith("BATCHERY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def toml(text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    Path("batchery.toml").write_bytes(data)


def complaint(conf: Any = None, **keywords: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.load(conf, **keywords)
    return str(caught.value)


def test_settings_without_a_source_are_the_defaults() -> None:
    settings = Settings.load()
    assert (settings.max_batch_size, settings.max_wait_ms, settings.devices) == (64, 0, "auto")
    assert settings.models == {}


def test_each_source_outranks_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    toml("max_batch_size = 1")
    assert Settings.load().max_batch_size == 1
    monkeypatch.setenv("BATCHERY_MAX_BATCH_SIZE", "2")
    assert Settings.load().max_batch_size == 2
    conf = {"batchery_max_batch_size": 3}
    assert Settings.load(conf).max_batch_size == 3
    assert Settings.load(conf, max_batch_size=4).max_batch_size == 4


def test_settings_of_several_sources_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    toml('[models.embed]\nkind = "embedding"\nmodel = "x"\ndtype = "fp16"')
    monkeypatch.setenv("BATCHERY_MODELS__EMBED__DTYPE", "bf16")
    monkeypatch.setenv("BATCHERY_MAX_WAIT_MS", "2.5")
    settings = Settings.load({"batchery_prefetch_batches": 5}, max_batch_size=7)
    assert settings.models["embed"] == ModelSettings(kind="embedding", model="x", dtype="bf16")
    assert (settings.max_wait_ms, settings.prefetch_batches, settings.max_batch_size) == (2.5, 5, 7)


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.load().max_batch_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spelled", "devices"),
    [
        ("auto", "auto"),
        ("cpu", ["cpu"]),
        ("cuda", ["cuda"]),
        ("cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        (" cuda:0 , cpu ", ["cuda:0", "cpu"]),
        ('["cuda:3", "mps"]', ["cuda:3", "mps"]),
    ],
)
def test_devices_are_accepted_in_all_common_spellings(
    spelled: str, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHERY_DEVICES", spelled)
    assert Settings.load().devices == devices
    if not spelled.startswith("["):
        assert Settings.load(devices=spelled).devices == devices
    assert Settings.load(devices=devices).devices == devices


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ("gpu", "'gpu' is not a device; use 'auto', 'cpu', 'cuda:0' or 'mps'"),
        ("cuda:x", "'cuda:x' is not a device"),
        ("cpu,cpu:0", "a device is named twice"),
        ("cuda:0,", "'' is not a device"),
        ([], "use 'auto', or a list such as"),
        (0, "use 'auto', or a list such as"),
        ([0], "0 is not a device"),
        (["cpu", "cpu"], "named twice"),
        (["cuda", "cuda:0"], "named twice"),
        (["cuda:0+cuda:1", "cuda:1"], "named twice"),
        (["cuda:0+cuda:0"], "named twice"),
        (["cuda:0+mps"], "such as 'cuda:0+cuda:1', 'cuda:0+cpu' or 'cpu+disk'"),
        (["disk"], "'disk' is not a device"),
        (["cpu+cuda:0"], "'cpu+cuda:0' is not a device"),
    ],
)
def test_impossible_devices_are_refused(devices: Any, problem: str) -> None:
    text = complaint(devices=devices)
    assert text.startswith(f"setting devices = {devices!r} (from a keyword of install()): ")
    assert problem in text


WRONG = [
    ("max_batch_size", 0, "greater than 0"),
    ("max_batch_size", "many", "integer"),
    ("max_batch_tokens", -5, "greater than 0"),
    ("max_wait_ms", -1, "greater than or equal to 0"),
    ("max_wait_ms", 1e9, "less than or equal to 3600000"),
    ("max_wait_ms", float("nan"), "equal to"),
    ("prefetch_batches", 0, "greater than 0"),
    ("device_start_timeout_s", 0, "greater than 0"),
    ("completion_threads", 65, "less than or equal to 64"),
    ("result_expires_s", 0, "greater than 0"),
    ("redis_url", 7, "string"),
    ("models", [], "dict"),
]


@pytest.mark.parametrize(("name", "value", "problem"), WRONG)
def test_a_wrong_value_is_named_with_its_source(name: str, value: Any, problem: str) -> None:
    text = complaint(**{name: value})
    assert text.startswith(f"setting {name} = {value!r} (from a keyword of install()): ")
    assert problem in text
    text = complaint({f"batchery_{name}": value})
    assert text.startswith(f"setting {name} = {value!r} (from app.conf.batchery_{name}): ")
    assert problem in text


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHERY_MAX_BATCH_SIZE", "0")
    assert complaint().startswith(
        "setting max_batch_size = '0' (from environment variable BATCHERY_MAX_BATCH_SIZE): "
    )
    monkeypatch.delenv("BATCHERY_MAX_BATCH_SIZE")
    monkeypatch.setenv("batchery_max_batch_size", "no")
    assert "(from environment variable batchery_max_batch_size): " in complaint()


def test_a_wrong_value_in_the_file_is_named() -> None:
    toml("max_wait_ms = -1")
    assert complaint().startswith("setting max_wait_ms = -1 (from batchery.toml): ")


def test_error_names_the_source_of_the_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    toml('[models.embed]\nkind = "poetry"\nmodel = "x"')
    monkeypatch.setenv("BATCHERY_MODELS__EMBED__MAX_LENGTH", "512")
    assert complaint(models={"other": {"dtype": "fp16"}}).startswith(
        "setting models.embed.kind = 'poetry' (from batchery.toml): "
    )
    monkeypatch.setenv("BATCHERY_MODELS__EMBED__KIND", "prose")
    assert complaint().startswith(
        "setting models.embed.kind = 'prose'"
        " (from environment variable BATCHERY_MODELS__EMBED__KIND): "
    )


def test_missing_field_of_a_model_is_named() -> None:
    text = complaint(models={"embed": {"kind": "embedding"}})
    assert text == "setting models.embed.model (from a keyword of install()): Field required"
    toml('[models.embed]\nmodel = "x"')
    assert complaint() == "setting models.embed.kind (from batchery.toml): Field required"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("max_length", 0),
        ("overflow", "explode"),
        ("max_chars", 0),
        ("pooling", "max"),
        ("dimensions", 0),
        ("prompts", "query: "),
        ("max_batch_size", -1),
        ("max_wait_ms", -1),
    ],
)
def test_a_wrong_value_of_a_model_is_named_by_its_path(field: str, value: Any) -> None:
    models = {"embed": {"kind": "embedding", "model": "x", field: value}}
    assert complaint(models=models).startswith(f"setting models.embed.{field} = {value!r} (from ")


# Unknown names, in every source


def test_an_unknown_keyword_is_refused() -> None:
    assert complaint(max_batchsize=3) == (
        "setting max_batchsize (from a keyword of install()): no such setting,"
        " the nearest is max_batch_size"
    )


def test_an_unknown_entry_of_the_file_is_refused() -> None:
    toml("max_batchsize = 3")
    assert complaint() == (
        "setting max_batchsize (from batchery.toml): no such setting, the nearest is max_batch_size"
    )
    toml('[models.embed]\nkind = "embedding"\nmodel = "x"\ndtyp = "fp16"')
    assert complaint() == (
        "setting models.embed.dtyp (from batchery.toml): no such setting, the nearest is dtype"
    )
    # It is named before what is missing because of it.
    toml('[models.embed]\nkind = "embedding"\nmodle = "x"')
    assert complaint() == (
        "setting models.embed.modle (from batchery.toml): no such setting, the nearest is model"
    )
    toml("[gateway]\nprot = 80")
    assert complaint().endswith("no such setting, the nearest is port")
    toml("[gateway]\nzzz = 80")
    assert complaint() == "setting gateway.zzz (from batchery.toml): no such setting"


@pytest.mark.parametrize("name", ["BATCHERY_MAX_BATCHSIZE", "batchery_typo", "BATCHERY_MODEL__X"])
def test_an_unknown_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    text = complaint()
    assert text.startswith(f"environment variable {name}: no such setting")
    assert "; there are BATCHERY_" in text
    assert "BATCHERY_MAX_BATCH_SIZE" in text


def make_app(**options: Any) -> Celery:
    return Celery("set", broker="memory://", set_as_current=False, **options)


def test_an_unknown_entry_of_the_configuration_is_refused() -> None:
    app = make_app()
    app.conf.batchery_max_batchsize = 3
    assert complaint(app.conf).startswith(
        "app.conf.batchery_max_batchsize: no such setting,"
        " the nearest is batchery_max_batch_size; there are "
    )
    assert "batchery_max_batch_size" in complaint({"batchery_typo": 1})


def test_an_entry_in_capitals_without_a_namespace_is_refused() -> None:
    """Celery would not find it; nobody shall wonder why it has no effect."""
    app = make_app()
    app.config_from_object({"BATCHERY_MAX_BATCH_SIZE": 3})
    assert complaint(app.conf).startswith("app.conf.BATCHERY_MAX_BATCH_SIZE: no such setting")


def test_a_namespace_works_though_the_configuration_was_not_loaded_before() -> None:
    app = make_app()
    app.config_from_object({"CELERY_BATCHERY_MAX_BATCH_SIZE": 3}, namespace="CELERY")
    install(app)
    assert get_installation(app).settings.max_batch_size == 3
    other = make_app()
    other.config_from_object({"CELERY_BATCHERY_SIZE": 3}, namespace="CELERY")
    assert complaint(other.conf).startswith("app.conf.CELERY_BATCHERY_SIZE: no such setting")


def test_a_configuration_module_may_import_batchery() -> None:
    class Module:
        import batchery_producer

        batchery_max_batch_size = 3
        task_time_limit = 9

    app = make_app()
    app.config_from_object(Module)
    assert Settings.load(app.conf).max_batch_size == 3


def test_configuration_of_other_packages_is_ignored() -> None:
    app = make_app()
    app.conf.update(battery_low=True, my_batchery_thing=1, task_default_queue="x")
    assert Settings.load(app.conf) == Settings.load()
    assert celery.__version__


# Files and variables that cannot be read


def test_a_variable_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toml("max_batch_size = 3")
    (tmp_path / "other.toml").write_text("max_batch_size = 0")
    monkeypatch.setenv("BATCHERY_SETTINGS_FILE", "other.toml")
    assert complaint().startswith("setting max_batch_size = 0 (from other.toml): ")
    monkeypatch.setenv("BATCHERY_SETTINGS_FILE", "not-there.toml")
    assert complaint().startswith(
        "environment variable BATCHERY_SETTINGS_FILE: there is no file 'not-there.toml'; "
    )


def test_a_folder_in_the_place_of_the_file_is_refused() -> None:
    Path("batchery.toml").mkdir()
    assert complaint().startswith("batchery.toml: it is no file; ")


@pytest.mark.parametrize("name", ["redis_url", "result_url"])
def test_what_is_no_url_is_refused(name: str) -> None:
    def load(url: str) -> Settings:
        return Settings.load({f"batchery_{name}": url})

    for wrong, problem in (
        ("localhost:6379", "write it as redis://localhost:6379/0"),
        ("redis://:secret@localhost:port/0", "Port could not be cast"),
    ):
        with pytest.raises(SettingsError, match=problem) as caught:
            load(wrong)
        assert "secret" not in str(caught.value)
    for right in (
        "redis+socket:///run/a:b.sock",
        "sentinel://one:1;sentinel://two:2",
        "rpc://",
        "",
    ):
        assert getattr(load(right), name) == right


def test_a_broken_file_is_one_line_that_says_where() -> None:
    toml("max_batch_size = \nmax_wait_ms = 1")
    text = complaint()
    assert text.startswith("batchery.toml: not valid TOML: ")
    assert "line 1" in text
    toml(b'redis_url = "\xff"')
    assert complaint().startswith("batchery.toml: not valid TOML: 'utf-8' codec")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_file_that_may_not_be_read_is_named() -> None:
    toml("max_batch_size = 3")
    Path("batchery.toml").chmod(0)
    Path.cwd().chmod(0o711)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)  # root may read everything
    try:
        assert complaint() == "batchery.toml: cannot be read: Permission denied"
    finally:
        os.seteuid(was)


def test_a_variable_with_broken_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHERY_MODELS", '{"embed":')
    text = complaint()
    assert 'field "models"' in text
    assert "line 1 column" in text
    assert "\n" not in text


def test_setting_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, _ in WRONG:
        assert "\n" not in complaint(**{name: value})


@pytest.mark.parametrize("alias", ["other", "twice", "", "two words", "a,b"])
def test_an_alias_is_the_name_of_one_model(alias: str) -> None:
    model = {"kind": "embedding", "model": "x/y"}
    models = {
        "embed": {**model, "aliases": ["twice", "text-embedding-3-small"]},
        "other": {**model, "aliases": [alias]},
    }
    assert f"alias {alias!r} of 'other'" in complaint(models=models)


def test_a_model_knows_its_aliases() -> None:
    model = {"kind": "embedding", "model": "x/y", "aliases": ["ada", "text-embedding-3-small"]}
    app = install(
        Celery(set_as_current=False), models={"embed": model, "plain": model | {"aliases": []}}
    )
    app.finalize()
    tasks: Any = app.tasks
    assert tasks["embed"].model_aliases == "ada,text-embedding-3-small"
    assert tasks["plain"].model_aliases is None
    assert tasks["embed"].is_installed


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ({}, "classes"),
        ({"a": {"level": 0, "share": -1}}, "classes.a.share = -1"),
        ({"a": {"level": 0, "share": 0}}, "classes.a.share = 0"),
        ({"a": {"level": 10, "share": 1}}, "classes.a.level = 10"),
        ({"a": {"level": 0}}, "classes.a.share"),
        ({"a": {"level": 0, "share": 1, "weight": 2}}, "classes.a.weight"),
        ({"a": {"level": 0, "share": 1, "max_waiting": 0}}, "classes.a.max_waiting = 0"),
        ({"a": {"level": 0, "share": 1, "max_wait_s": -1}}, "classes.a.max_wait_s = -1"),
        ({"a": {"level": 1, "share": 1}}, "no class has level 0"),
        ({"a": {"level": 0, "share": 1}, "b": {"level": 0, "share": 1}}, "have the same level"),
    ],
)
def test_impossible_classes_are_refused(classes: Any, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Settings.load(classes=classes)


def test_every_priority_has_a_class() -> None:
    settings = Settings.load(
        classes={"rest": {"level": 0, "share": 1}, "night": {"level": 9, "share": 0.5}}
    )
    assert settings.shares == {"rest": 1, "night": 0.5}
    assert [settings.find_class(each) for each in range(10)] == ["rest"] * 9 + ["night"]
