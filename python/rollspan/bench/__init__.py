"""``rollspan bench``: measurements of a running server from outside, and of the engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollspan.flags import Parser


def main(words: Sequence[str]) -> int:
    """Run ``rollspan bench WORDS``; returns the exit code."""
    from rollspan.bench import latency, serve, throughput

    parser = Parser(prog="rollspan bench", description="Measure a running server, or the engine alone.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_arguments(commands.add_parser("serve", help=serve.SUMMARY, description=serve.DESCRIPTION))
    offline: dict[str, Any] = {"throughput": throughput, "latency": latency}
    parsers = {
        name: commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION, conflict_handler="resolve")
        for name, module in offline.items()
    }
    for name, module in offline.items():
        module.add_arguments(parsers[name])
    args = parser.parse_args(words)
    if args.command == "serve":
        return serve.run(args)
    return int(offline[args.command].run(parsers[args.command], args))
