"""The language models that ship inside the package, found by name.

Both are checkpoints of one tiny Qwen3 trained on 2-digit addition by ``python -m rollspan.models.train``: ``add2-sft``
is where supervised training ends, ``add2-rl`` where reinforcement learning goes on to. They are ordinary Hugging Face
directories (safetensors, tokenizer.json), so demos and tests have two real sets of weights without a download.

Importing this module costs nothing: no torch, no transformers.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEFAULT", "names", "path", "resolve", "root"]

DEFAULT = "add2-rl"
"""Name of the model that ``rollspan serve`` serves when it is given none."""

_NAMES = ("add2-sft", "add2-rl")


def root() -> Path:
    """Directory that holds every embedded model: a good ``--weights-root`` for demos and tests."""
    return Path(__file__).resolve().parent


def names() -> tuple[str, ...]:
    """Names of the embedded models, in the order of their training stages."""
    return _NAMES


def path(name: str = DEFAULT) -> Path:
    """Directory of the embedded model ``name``.

    Raises:
        KeyError: no embedded model has that name.
        FileNotFoundError: the installation lacks its files.
    """
    if name not in _NAMES:
        raise KeyError(f"no embedded model is called {name!r}; there are {', '.join(_NAMES)}")
    directory = root() / name
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"the embedded model {name!r} is not installed: {directory} has no config.json")
    return directory


def resolve(model: str | None) -> Path:
    """Directory of ``model``: a directory with a config.json, the name of an embedded model, or None for the default.

    A directory wins over an embedded model of the same name only when it is written as a path (``./add2-sft``).

    Raises:
        FileNotFoundError: it is neither; the message says what was tried.
    """
    if model is None:
        return path(DEFAULT)
    if model in _NAMES:
        return path(model)
    directory = Path(model).expanduser()
    if (directory / "config.json").is_file():
        return directory.resolve()
    problem = (
        "has no config.json" if directory.is_dir() else "is not a directory" if directory.exists() else "does not exist"
    )
    raise FileNotFoundError(
        f"model {model!r}: {directory.absolute()} {problem}, and the embedded models are {', '.join(_NAMES)}; "
        "give a directory in Hugging Face layout or one of these names"
    )
