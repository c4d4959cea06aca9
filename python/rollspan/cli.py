"""The ``rollspan`` command: finds the command's module and hands over. Imports neither torch nor a frontend.

Exit codes: 0 when what was asked for was done, 1 for a failure, 2 for wrong usage; every error is one line.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rollspan.flags import Parser
from rollspan.version import __version__

DESCRIPTION = """\
rollspan: rollouts for RL post-training. Token ids in, token ids out, and every output token carries proof of which
weights sampled it, across live weight updates.
"""

EXAMPLES = """\
examples:
  rollspan demo                                   watch rollouts while the weights change under them
  rollspan serve                                  serve the embedded model on http://127.0.0.1:8000
  rollspan serve ./my-model --weights-root /ckpt  serve yours, and take weight updates from below /ckpt
  rollspan COMMAND --help                         all that a command can do
"""

COMMANDS = {
    "serve": ("start an engine and an HTTP server on it", "rollspan.serve", "serve"),
    "engine": ("run an engine alone, for a frontend started apart", "rollspan.serve", "engine"),
    "demo": ("see rollouts across a live weight update, coloured by version", "rollspan.demo", "main"),
    "verify": ("score recorded rollouts again under the checkpoints that their spans name", "rollspan.verify", "main"),
    "digest": ("print the content digest of a model's weights", "rollspan.digest_command", "main"),
    "bench": ("measure a running server, or the engine alone and against others", "rollspan.bench", "main"),
}
"""Name of a command -> what it does, its module, and the function there that takes the words after the name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the ``rollspan`` command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        return _without_command(words)
    _, module, function = COMMANDS[words[0]]
    return int(getattr(importlib.import_module(module), function)(words[1:]))


def _without_command(words: list[str]) -> int:
    listing = "\n".join(f"  {name:<8} {text}" for name, (text, _, _) in COMMANDS.items())
    parser = Parser(
        prog="rollspan",
        usage="rollspan COMMAND ...",
        description=f"{DESCRIPTION}\ncommands:\n{listing}",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"rollspan {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), help=argparse.SUPPRESS)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    parser.parse_args(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
