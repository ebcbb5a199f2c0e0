"""Where settings come from, and what is said of wrong ones."""

import os
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchery import ModelSettings, Settings, SettingsError, install
from batchery.installation import get_installation


@pytest.fixture(autouse=True)
def clean(no_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, and no variable of ours."""
    monkeypatch.chdir(tmp_path)


def toml(text: str | bytes, name: str = "batchery.toml") -> None:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)


def complaint(conf: Any = None, **keywords: Any) -> str:
    """What is said of settings; always one line."""
    with pytest.raises(SettingsError) as caught:
        Settings.load(conf, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_source_outranks_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load().max_batch_size == 64
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
    settings = Settings.load({"batchery_cache_ttl_s": 5}, max_batch_size=7)
    assert settings.models["embed"] == ModelSettings(kind="embedding", model="x", dtype="bf16")
    assert (settings.max_wait_ms, settings.cache_ttl_s, settings.max_batch_size) == (2.5, 5, 7)


def test_a_variable_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    toml("max_batch_size = 3")
    toml("max_batch_size = 4", "other.toml")
    monkeypatch.setenv("BATCHERY_SETTINGS_FILE", "other.toml")
    assert Settings.load().max_batch_size == 4
    monkeypatch.setenv("BATCHERY_SETTINGS_FILE", "not-there.toml")
    assert complaint().startswith("not-there.toml: there is no such file; ")


# Devices, classes, aliases, URLs


@pytest.mark.parametrize(
    ("spelled", "devices"),
    [
        ("auto", "auto"),
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
        ("gpu", "'gpu' is not a device"),
        ("cuda:x", "'cuda:x' is not a device"),
        ("cuda:0,", "'' is not a device"),
        ([], "use 'auto', or a list"),
        (0, "use 'auto', or a list"),
        ([0], "0 is not a device"),
        ("cpu,cpu:0", "named twice"),
        (["cuda", "cuda:0"], "named twice"),
        (["cuda:0+cuda:1", "cuda:1"], "named twice"),
        (["cuda:0+cuda:0"], "named twice"),
        (["cuda:0+mps"], "such as 'cuda:0+cuda:1'"),
        (["disk"], "'disk' is not a device"),
        (["cpu+cuda:0"], "'cpu+cuda:0' is not a device"),
    ],
)
def test_impossible_devices_are_refused(devices: Any, problem: str) -> None:
    text = complaint(devices=devices)
    assert text.startswith(f"setting devices = {devices!r} (from ")
    assert problem in text


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ({}, "classes"),
        ({"a": {"level": 0, "share": 0}}, "setting classes.a.share = 0 (from "),
        ({"a": {"level": 10, "share": 1}}, "classes.a.level = 10"),
        ({"a": {"level": 0}}, "classes.a.share"),
        ({"a": {"level": 0, "share": 1, "weight": 2}}, "classes.a.weight"),
        ({"a": {"level": 1, "share": 1}}, "no class has level 0"),
        ({"a": {"level": 0, "share": 1}, "b": {"level": 0, "share": 1}}, "have the same level"),
    ],
)
def test_impossible_classes_are_refused(classes: Any, problem: str) -> None:
    assert problem in complaint(classes=classes)


def test_every_priority_has_a_class() -> None:
    settings = Settings.load(
        classes={"rest": {"level": 0, "share": 1}, "night": {"level": 9, "share": 0.5}}
    )
    assert settings.shares == {"rest": 1, "night": 0.5}
    assert [settings.find_class(each) for each in range(10)] == ["rest"] * 9 + ["night"]


@pytest.mark.parametrize("alias", ["other", "twice", "", "two words", "a,b"])
def test_an_alias_is_the_name_of_one_model(alias: str) -> None:
    model = {"kind": "embedding", "model": "x/y"}
    embed = {**model, "aliases": ["twice", "text-embedding-3-small"]}
    models = {"embed": embed, "other": {**model, "aliases": [alias]}}
    assert f"alias {alias!r} of 'other'" in complaint(models=models)


@pytest.mark.parametrize("name", ["redis_url", "result_url"])
def test_what_is_no_url_is_refused_and_no_password_shown(name: str) -> None:
    for wrong in ("localhost:6379", "redis://:secret@localhost:port/0"):
        text = complaint({f"batchery_{name}": wrong})
        assert text.startswith(f"setting {name}")
        assert "secret" not in text
    for right in (
        "redis+socket:///run/a:b.sock",
        "sentinel://one:1;sentinel://two:2",
        "rpc://",
        "",
    ):
        assert getattr(Settings.load({f"batchery_{name}": right}), name) == right


# Wrong values: each is named with its source


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 0),
        ("max_batch_size", "many"),
        ("max_wait_ms", -1),
        ("max_wait_ms", 1e9),
        ("max_wait_ms", float("nan")),
        ("redis_url", 7),
        ("models", []),
    ],
)
def test_a_wrong_value_is_named_with_its_source(name: str, value: Any) -> None:
    text = f"setting {name} = {value!r} (from "
    assert complaint(**{name: value}).startswith(f"{text}a keyword of install()): ")
    conf = {f"batchery_{name}": value}
    assert complaint(conf).startswith(f"{text}app.conf.batchery_{name}): ")


@pytest.mark.parametrize("variable", ["BATCHERY_MAX_BATCH_SIZE", "batchery_max_batch_size"])
def test_a_wrong_variable_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toml("max_batch_size = 1")
    monkeypatch.setenv(variable, "no")
    text = f"setting max_batch_size = 'no' (from environment variable {variable}): "
    assert complaint().startswith(text)


def test_error_names_the_source_of_the_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    toml('[models.embed]\nkind = "poetry"\nmodel = "x"')
    monkeypatch.setenv("BATCHERY_MODELS__EMBED__MAX_LENGTH", "512")
    text = "setting models.embed.kind = 'poetry' (from batchery.toml): "
    assert complaint(models={"other": {"dtype": "fp16"}}).startswith(text)
    monkeypatch.setenv("BATCHERY_MODELS__EMBED__KIND", "prose")
    assert "(from environment variable BATCHERY_MODELS__EMBED__KIND): " in complaint()


def test_missing_field_of_a_model_is_named() -> None:
    text = complaint(models={"embed": {"kind": "embedding"}})
    assert text.startswith("setting models.embed.model (from a keyword of install()): ")
    toml('[models.embed]\nmodel = "x"')
    assert complaint().startswith("setting models.embed.kind (from batchery.toml): ")


# Unknown names, in every source


@pytest.mark.parametrize("other", [{"kind": "rerank"}, {"engine": "onnx"}])
def test_only_embeddings_of_transformers_have_feeders(other: dict[str, str]) -> None:
    model = {"kind": "embedding", "model": "x", "feeders": 2}
    assert Settings.load(models={"embed": model}).models["embed"].feeders == 2
    assert "leave feeders out" in complaint(models={"embed": {**model, **other}})


def test_an_unknown_keyword_is_refused_with_the_nearest_one() -> None:
    text = complaint(max_batchsize=3)
    assert text.startswith("setting max_batchsize (from a keyword of install()): no such setting")
    assert text.endswith("the nearest is max_batch_size")


@pytest.mark.parametrize(
    ("content", "name", "nearest"),
    [
        ("max_batchsize = 3", "max_batchsize", "max_batch_size"),
        ('[models.a]\nkind = "embedding"\nmodel = "x"\ndtyp = "fp16"', "models.a.dtyp", "dtype"),
        # It is named before what is missing because of it.
        ('[models.a]\nkind = "embedding"\nmodle = "x"', "models.a.modle", "model"),
        ("[gateway]\nprot = 80", "gateway.prot", "port"),
        ("[gateway]\nzzz = 80", "gateway.zzz", None),
    ],
)
def test_an_unknown_entry_of_the_file_is_refused(
    content: str, name: str, nearest: str | None
) -> None:
    toml(content)
    end = f", the nearest is {nearest}" if nearest else ""
    assert complaint() == f"setting {name} (from batchery.toml): no such setting{end}"


@pytest.mark.parametrize("name", ["BATCHERY_MAX_BATCHSIZE", "batchery_typo", "BATCHERY_MODEL__X"])
def test_an_unknown_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    text = complaint()
    assert text.startswith(f"environment variable {name}: no such setting")
    assert "BATCHERY_MAX_BATCH_SIZE" in text


def make_app(**conf: Any) -> Celery:
    app = Celery("set", broker="memory://", set_as_current=False)
    app.config_from_object(conf)
    return app


# Celery would not find one in capitals; nobody must wonder why it has no effect.
@pytest.mark.parametrize("name", ["batchery_max_batchsize", "BATCHERY_MAX_BATCH_SIZE"])
def test_an_unknown_entry_of_the_configuration_is_refused(name: str) -> None:
    text = complaint(make_app(**{name: 3}).conf)
    assert text.startswith(f"app.conf.{name}: no such setting")
    assert "batchery_max_batch_size" in text


def test_a_namespace_works_though_the_configuration_was_not_loaded_before() -> None:
    app, other = make_app(), make_app()
    app.config_from_object({"CELERY_BATCHERY_MAX_BATCH_SIZE": 3}, namespace="CELERY")
    install(app)
    assert get_installation(app).settings.max_batch_size == 3
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
    conf = make_app(battery_low=True, my_batchery_thing=1, task_default_queue="x").conf
    assert Settings.load(conf) == Settings.load()


# Files and variables that cannot be read


@pytest.mark.parametrize("content", ["max_batch_size = \nmax_wait_ms = 1", b'redis_url = "\xff"'])
def test_a_broken_file_is_named(content: str | bytes) -> None:
    toml(content)
    assert complaint().startswith("batchery.toml: not valid TOML: ")


def test_a_folder_in_the_place_of_the_file_is_refused() -> None:
    Path("batchery.toml").mkdir()
    assert complaint().startswith("batchery.toml: there is no such file; ")


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
    assert 'field "models"' in complaint()
