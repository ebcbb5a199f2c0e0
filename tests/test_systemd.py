"""The units of deploy/systemd are what systemd understands, and name commands that exist."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from support.deployed import DEPLOY, ROOT, check_environment
from support.docs_commands import check, executable

FOLDER = DEPLOY / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
EACH_UNIT = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)

#: Where the units expect the commands.
BIN = "/opt/batchery/bin/"


class Unit(configparser.RawConfigParser):
    """A unit; what may be there several times is joined."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read(path)
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^Environment=(.*)", text, re.MULTILINE)
        pairs = [each.partition("=") for line in lines for each in shlex.split(line)]
        # A shell may say more of them.
        shell = dict(re.findall(r"\bexport (\w+)=([^;]+);", text))
        self.environment = {name: value for name, _, value in pairs} | shell

    def words(self, instance: int = 0) -> list[str]:
        """The words of ExecStart as systemd reads them, with the app that common.conf names."""
        text = self["Service"]["ExecStart"].replace("${CELERY_APP}", "batchery.app")
        for name, value in (("%i", str(instance)), ("%%", "%"), ("$$", "$")):
            text = text.replace(name, value)
        return shlex.split(text)

    @property
    def command(self) -> list[str]:
        """The words of the program that runs in the end, of instance 0."""
        words = self.words()
        return shlex.split(words[2].rpartition("exec ")[2]) if words[0] == "/bin/sh" else words


COMMON = Unit(FOLDER / "batchery-.service.d" / "common.conf")


def test_there_is_a_unit_for_each_part() -> None:
    names = ["exporter", "gateway", "worker", "worker@"]
    assert [path.stem for path in UNITS] == [f"batchery-{name}" for name in names]


@EACH_UNIT
def test_every_command_and_setting_exists(path: Path) -> None:
    unit = Unit(path)
    program, *words = unit.command
    assert program.startswith(BIN)
    check([program.removeprefix(BIN), *words])
    check_environment([*unit.environment, *COMMON.environment])


def test_redis_outlives_the_units_at_a_shutdown_whatever_its_unit_is_called() -> None:
    """Debian adds `-server`; Fedora, Arch and others do not. What starts later ends sooner."""
    after = COMMON["Unit"]["After"].split()
    assert {"redis.service", "valkey.service"} <= set(after)
    assert {"redis-server.service", "valkey-server.service"} <= set(after)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_understands_all_of_them(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    here = Path(executable("batchery") or "").parent
    for path in tmp_path.glob("*.service"):
        path.write_text(path.read_text(encoding="utf-8").replace(BIN, f"{here}{os.sep}"))
    (tmp_path / "batchery-worker@.service").rename(tmp_path / "batchery-worker@0.service")
    units = sorted(each.name for each in tmp_path.glob("*.service"))
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    verify = subprocess.run(
        ["systemd-analyze", "verify", *(f"./{each}" for each in units)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # Of other units of this machine it may say anything.
    assert verify.returncode == 0, verify.stderr
    assert "batchery" not in verify.stderr


@pytest.mark.parametrize("name", ["batchery-worker.service", "batchery-worker@.service"])
def test_a_worker_says_when_it_is_ready_and_has_time_to_finish(name: str) -> None:
    unit = Unit(FOLDER / name)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["TimeoutStopSec"] == "2min"
    assert COMMON["Service"]["KillMode"] == "mixed", "devices must outlive the first SIGTERM"
    assert COMMON["Service"]["KillSignal"] == "SIGTERM"
    # One device that the kernel kills is replaced by its worker.
    assert service["OOMPolicy"] == "continue"
    is_template = "@" in name
    assert ("CUDA_VISIBLE_DEVICES" in unit.environment) is is_template
    assert ("%i" in unit.environment["BATCHERY_METRICS__PORT"]) is is_template
    # systemd would put the user's home in the place of a single %h.
    assert "@%h" in unit.command[-1]


@pytest.mark.parametrize("gpu", [0, 9, 10, 127])
def test_each_gpu_s_worker_has_a_port_of_its_own(tmp_path: Path, gpu: int) -> None:
    celery = tmp_path / "celery"
    celery.write_text('#!/bin/sh\necho $$ $BATCHERY_METRICS__PORT "$@"\n')
    celery.chmod(0o755)
    unit = Unit(FOLDER / "batchery-worker@.service")
    words = [each.replace(BIN, f"{tmp_path}{os.sep}") for each in unit.words(gpu)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
    # It has taken the shell's place: systemd knows it as the main process, to be notified by.
    arguments = f"-A batchery.app worker -l INFO -n gpu{gpu}@%h"
    assert said.split("\n")[0] == f"{process.pid} {9470 + gpu} {arguments}"


def test_a_unit_of_type_notify_is_of_a_program_that_notifies() -> None:
    sources = [*(ROOT / "common").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    assert any("NOTIFY_SOCKET" in path.read_text(encoding="utf-8") for path in sources)
