"""Prints the variables that :func:`rollspan.numerics.environment` returns, for ``eval`` in a shell."""

import shlex
import sys

from rollspan.numerics import environment

for name, value in environment().items():
    sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
