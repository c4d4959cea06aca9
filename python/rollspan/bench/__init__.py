"""``rollspan bench``: measurements of a running server, from outside."""

from __future__ import annotations

from collections.abc import Sequence

from rollspan.flags import Parser


def main(words: Sequence[str]) -> int:
    """Run ``rollspan bench WORDS``; returns the exit code."""
    from rollspan.bench import serve

    parser = Parser(prog="rollspan bench", description="Measure a running server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_arguments(commands.add_parser("serve", help=serve.SUMMARY, description=serve.DESCRIPTION))
    return serve.run(parser.parse_args(words))
