"""The command line's flags: engine flags derived from :class:`EngineConfig`, and those of the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rollspan import models
from rollspan.config import EngineConfig
from rollspan.errors import RollspanError

LOG_LEVEL: dict[str, Any] = {
    "choices": ("error", "warning", "info", "debug"),
    "default": "info",
    "help": "least severe level logged (default: info)",
}

FRONTEND_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--host", {"metavar": "ADDRESS", "help": "address to listen on (default: 127.0.0.1)"}),
    ("--port", {"metavar": "N", "type": int, "help": "port to listen on; 0 takes any free one (default: 8000)"}),
    ("--max-body-bytes", {"metavar": "N", "type": int, "help": "largest request body (default: 64 MiB)"}),
    (
        "--max-queued-requests",
        {"metavar": "N", "type": int, "help": "most open requests; more get 429 (default: 4096)"},
    ),
    (
        "--max-weight-upload-bytes",
        {"metavar": "N", "type": int, "help": "most bytes of uploads of weights (default: two models, and 64 MiB)"},
    ),
    (
        "--strict-requests",
        {"action": "store_true", "help": "refuse unknown fields of generate requests, not only name them"},
    ),
    (
        "--engine-ready-timeout",
        {"metavar": "S", "type": float, "help": "seconds for the engine's start (default: 600)"},
    ),
    (
        "--shutdown-timeout",
        {"metavar": "S", "type": float, "default": 5.0, "help": "seconds for open requests at the end (default: 5)"},
    ),
    ("--insecure", {"action": "store_true", "help": "allow an address that other machines reach, without a key"}),
    ("--log-level", LOG_LEVEL),
)
"""What both frontends understand. What isn't given isn't passed on, so that their own defaults hold."""


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for each field of :class:`EngineConfig`, from the field's own type, default and metadata."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineConfig):
        metadata = field.metadata
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _flag_help(field)}
        if metadata.get("positional"):
            embedded = ", ".join(models.names())
            options["help"] += f", or an embedded model: {embedded} (default: {models.DEFAULT})"
            parser.add_argument(field.name, metavar=field.name.upper(), nargs="?", **options)
            continue
        if metadata.get("hidden"):
            options["help"] = argparse.SUPPRESS
        kinds = str(field.type).split(" | ")
        if "bool" in kinds:
            options["action"] = argparse.BooleanOptionalAction
        elif "choices" in metadata:
            options["choices"] = metadata["choices"]
        else:
            options["type"] = int if "int" in kinds else float if "float" in kinds else str
            options["metavar"] = "N" if "int" in kinds else field.name.rsplit("_", 1)[-1].upper()
        group.add_argument(metadata.get("flag", "--" + field.name.replace("_", "-")), dest=field.name, **options)


def add_set_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the number of engines."""
    parser.add_argument(
        "--data-parallel-size",
        metavar="N",
        type=_at_least_one,
        default=1,
        help="engines with the same weights, each for requests of its own (default: 1)",
    )


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be an integer of at least 1")
    return value


_at_least_one.__name__ = "integer"


def _flag_help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    if field.default is None or field.default == "" or "default:" in text:
        return text
    return f"{text} (default: {field.default})"


def add_frontend_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the HTTP server's flags, and the choice of the server."""
    group = parser.add_argument_group("HTTP server")
    for flag, options in FRONTEND_FLAGS:
        group.add_argument(flag, **{"default": argparse.SUPPRESS, **options})
    group.add_argument(
        "--frontend",
        choices=("auto", "rust", "python"),
        default="auto",
        help="HTTP server: rollspan-http, the pure-Python one, or the first where it is installed (default: auto)",
    )
    group.add_argument("--watch-stdin", action="store_true", help=argparse.SUPPRESS)  # end when stdin does
    group.add_argument("--events", action="store_true", help="print JSON lines on stdout: listening, ready")


def frontend_arguments(flags: Mapping[str, Any]) -> list[str]:
    """The flags of the frontend's command line that were given."""
    given = []
    for flag, options in FRONTEND_FLAGS:
        name = flag[2:].replace("-", "_")
        if name in flags:
            given += [flag] if options.get("action") else [flag, str(flags[name])]
    return given


def engine_config(parser: Parser, flags: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration. Ends the program with code 2 for a value out of range, with 1 for a missing model."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    values = {name: value for name, value in flags.items() if name in fields}
    try:
        values["model"] = str(models.resolve(values.get("model")))
    except FileNotFoundError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    if values.get("weights_root") is not None:
        values["weights_root"] = str(Path(values["weights_root"]).expanduser().resolve())
    try:
        return EngineConfig(**values)
    except RollspanError as error:
        parser.error(error.message)
