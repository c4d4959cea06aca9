"""``python -m rollspan.frontend``: the same flags, output and exit codes as ``rollspan-http``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import rollspan
from rollspan.frontend.server import StartError, is_loopback, serve
from rollspan.frontend.state import FrontendOptions

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the frontend. Returns the exit code: 0 after a signal, 1 for a failure, 2 for wrong usage."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    if not is_loopback(flags.host) and not flags.insecure:
        parser.error(f"--host {flags.host} can be reached from other machines: add --insecure to allow that")
    logging.basicConfig(
        level=flags.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    options = FrontendOptions(
        engines=tuple(flags.engine),
        host=flags.host,
        port=flags.port,
        served_model_name=flags.served_model_name,
        max_body_bytes=flags.max_body_bytes,
        max_queued_requests=flags.max_queued_requests,
        strict_requests=flags.strict_requests,
        engine_ready_timeout=flags.engine_ready_timeout,
        shutdown_timeout=flags.shutdown_timeout,
        watch_stdin=flags.watch_stdin,
        weights_spool=flags.weights_spool,
        max_weight_upload_bytes=flags.max_weight_upload_bytes,
        weight_update_timeout=flags.weight_update_timeout,
    )
    try:
        return asyncio.run(serve(options))
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollspan.frontend", description="The pure-Python HTTP frontend.", allow_abbrev=False
    )
    defaults = FrontendOptions(engines=())
    add = parser.add_argument
    add(
        "--engine",
        metavar="PATH",
        action="append",
        required=True,
        help="the engine's Unix socket; once for each engine of a set, by index",
    )
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    add("--port", type=_integer(0, 65535), default=defaults.port, help="0 for any free one (default: %(default)s)")
    add("--served-model-name", metavar="NAME", help="name of the model in the API (default: the engine's)")
    add(
        "--max-body-bytes",
        metavar="BYTES",
        type=_integer(1),
        default=defaults.max_body_bytes,
        help="largest request body (default: %(default)s)",
    )
    add(
        "--max-queued-requests",
        metavar="N",
        type=_integer(1),
        default=defaults.max_queued_requests,
        help="most open requests; more get 429 (default: %(default)s)",
    )
    add("--strict-requests", action="store_true", help="refuse unknown request fields")
    add(
        "--engine-ready-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=defaults.engine_ready_timeout,
        help="how long the engine may take to start (default: %(default)g)",
    )
    add(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=defaults.shutdown_timeout,
        help="how long open requests may go on after a signal (default: %(default)g)",
    )
    add("--weights-spool", metavar="DIR", type=Path, help="private directory for uploads of weights (none: refused)")
    add(
        "--max-weight-upload-bytes",
        metavar="BYTES",
        type=_integer(1),
        help="most bytes of all uploads of weights together (default: two models in float32, and 64 MiB)",
    )
    add(
        "--weight-update-timeout",
        metavar="SECONDS",
        type=_some_seconds,
        default=defaults.weight_update_timeout,
        help="how long an upload of weights may be idle before it is deleted (default: %(default)g)",
    )
    add("--insecure", action="store_true", help="allow an address that other machines can reach")
    add("--watch-stdin", action="store_true", help="exit as soon as stdin is closed")
    add("--log-level", choices=LOG_LEVELS, default="info", help="least severe level logged (default: %(default)s)")
    add("--version", action="version", version=f"rollspan {rollspan.__version__}")
    return parser


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be at least {low}{'' if high is None else f' and at most {high}'}")
        return value

    convert.__name__ = "integer"
    return convert


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError("must be a number of seconds of at least 0")
    return value


def _some_seconds(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be a number of seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
