"""The engine process: ``python -m rollspan.engine.core_proc --socket PATH --config JSON [--watch-stdin]``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from rollspan.config import EngineConfig
from rollspan.engine.link import Link, Said
from rollspan.errors import RollspanError
from rollspan.launcher import PRIVATE_PREFIX
from rollspan.protocol import messages as m
from rollspan.protocol.codec import CallRefusedError, RequestRefusedError
from rollspan.protocol.framing import FrameKind

if TYPE_CHECKING:
    from rollspan.engine.core import EngineCore

logger = logging.getLogger("rollspan.engine")

_CLOSE_TIMEOUT = 1.0
_ACCEPT_RETRY_SECONDS = 0.1
#: Errors of accept() that pass: the process or the system is short of something, or the peer has gone already.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)


class _Ring(Enum):
    """Stands in the inbox for the core's bell: it may have something to do."""

    RING = "ring"


class StopSignalError(Exception):
    """SIGINT or SIGTERM arrived."""


class EngineProcess:
    """Owns the listening socket, the links and the loop around one EngineCore."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inbox: queue.SimpleQueue[Said | socket.socket | _Ring | None] = queue.SimpleQueue()
        self._links: dict[int, Link] = {}
        self._greeted: set[int] = set()
        self._next_index = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(old_mask)
        self._listener.listen(16)

    def serve(self, core: EngineCore) -> None:
        """Runs the core until a signal arrives.

        Raises:
            StopSignalError: SIGINT or SIGTERM.
        """
        core.bell.redirect(lambda: self._inbox.put(_Ring.RING))
        core.remove_client(0)  # the core's default for in-process use: here nobody is told anything before a hello
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        while True:
            self._receive(core)
            for client_index, message in core.step():
                link = self._links.get(client_index)
                if link is not None:
                    link.send(FrameKind.OUTPUTS, message)

    def _accept(self) -> None:
        while True:
            try:
                self._inbox.put(self._listener.accept()[0])
            except OSError as error:
                if error.errno not in _PASSING:
                    return  # the listener was closed
                logger.error("a frontend cannot connect: %s", error.strerror)
                time.sleep(_ACCEPT_RETRY_SECONDS)  # nothing announces that a file descriptor is free again

    def _receive(self, core: EngineCore) -> None:
        """Applies all that has arrived; waits for something when the core has nothing to do."""
        block = not core.has_work()
        deadline = core.next_deadline() if block else None
        while True:
            try:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                item = self._inbox.get(block=block, timeout=timeout)
            except queue.Empty:
                return
            block = False
            if item is None:
                raise StopSignalError
            if item is _Ring.RING:
                continue
            if isinstance(item, socket.socket):
                self._links[self._next_index] = Link(item, self._next_index, self._inbox.put)
                self._next_index += 1
            else:
                self._apply(core, *item)

    def _apply(self, core: EngineCore, link: Link, message: object) -> None:
        if message is None:
            self._links.pop(link.index, None)
            self._greeted.discard(link.index)
            core.remove_client(link.index)
        elif isinstance(message, m.ClientHello):
            link.send(FrameKind.ENGINE_HELLO, core.hello())
            core.add_client(link.index)
            self._greeted.add(link.index)
        elif link.index not in self._greeted:
            logger.error("frontend %d did not say hello first: closing its link", link.index)
            link.abandon()
        elif isinstance(message, m.EngineCoreRequest):
            message.client_index = link.index
            core.add_request(message)
        elif isinstance(message, RequestRefusedError):
            core.refuse_request(link.index, message.request_id, message)
        elif isinstance(message, list):
            core.abort_requests(message)
        elif isinstance(message, m.UtilityCall):
            core.call_utility(link.index, message)
        elif isinstance(message, CallRefusedError):
            core.refuse_call(link.index, message.call, RollspanError(message.message, reason="invalid_request"))

    def stop(self, *_: object) -> None:
        """Ends :meth:`serve`; safe to call from a signal handler."""
        self._inbox.put(None)

    def close(self, notice: m.DeadNotice) -> None:
        """Tells every frontend, also those that still wait for a hello, and removes the socket."""
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                self._links[self._next_index] = Link(self._listener.accept()[0], self._next_index, lambda _: None)
                self._next_index += 1
        for link in self._links.values():
            link.send(FrameKind.DEAD, notice)
        for link in list(self._links.values()):
            link.close(_CLOSE_TIMEOUT)
        self._listener.close()
        self._path.unlink(missing_ok=True)


def _watch_stdin(path: Path, spool: str | None) -> None:
    """Ends this process when the parent, which holds the other end of stdin, is gone.

    The parent cannot tidy up any more, so its private directories go as well: that of sockets once it is empty, that of
    uploads with what is in it.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    if spool is not None and Path(spool).name.startswith(PRIVATE_PREFIX):
        shutil.rmtree(spool, ignore_errors=True)
    os._exit(0)


def _complain(text: str) -> None:
    sys.stderr.write(f"rollspan engine: {text}\n")
    sys.stderr.flush()


def run(path: Path, config: EngineConfig, *, watch_stdin: bool = False) -> int:
    """Binds the socket, loads the model and serves it; returns the exit code."""
    process = EngineProcess(path)
    if watch_stdin:
        threading.Thread(
            target=_watch_stdin, args=(path, config.weights_spool), name="watch-stdin", daemon=True
        ).start()
    code, notice = 0, m.DeadNotice("shutting_down", "the engine is shutting down")

    def end_now(*_: object) -> None:
        # An exception would be at the mercy of whatever is being imported or loaded: some of it catches everything.
        process.close(notice)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_now)
    try:
        config.model_directory()  # a mistyped path is told at once, not after the seconds that torch takes
        gc.disable()  # nothing becomes garbage while torch is imported: looking for it takes 8 % of the start
        from rollspan.engine.core import EngineCore  # imports torch: the socket is bound by now

        gc.freeze()  # half a million objects that stay: the collection below need not look at them, which takes 0.3 s
        core = EngineCore(config)
        gc.enable()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, process.stop)
        gc.collect()
        gc.freeze()  # the model's objects live as long as the process: keep the collector off them
        model, facts = core.hello().model, core.facts()
        how = f"{facts['runner']} forward, {facts.get('attention', 'its own')} attention"
        logger.info("serving %s (%s on %s, %s) from %s", model.name, model.dtype, model.device, how, config.model)
        copies = facts["weight_staging_bytes"] + facts.get("derived_weight_bytes", 0)
        logger.info("a weight update takes %.1f MB besides (%s)", copies / 1e6, config.weight_update_mode)
        process.serve(core)
    except StopSignalError:
        pass
    except RollspanError as error:
        code, notice = 1, m.DeadNotice("engine_dead", error.message)
        _complain(error.message)
    except Exception as error:
        logger.exception("the engine has failed")
        code, notice = 1, m.DeadNotice("engine_dead", f"the engine has failed: {type(error).__name__}: {error}")
        _complain(notice.message)
    process.close(notice)
    return code


def main(argv: list[str] | None = None) -> int:
    """Command line of the engine process."""
    parser = argparse.ArgumentParser(prog="rollspan engine", description="One EngineCore behind a Unix socket.")
    parser.add_argument("--socket", required=True, type=Path, help="path of the Unix socket to listen on")
    parser.add_argument("--config", required=True, help="EngineConfig as a JSON object")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input ends (held by the parent)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return run(args.socket, EngineConfig.from_json(args.config), watch_stdin=args.watch_stdin)
    except RollspanError as error:
        _complain(error.message)
        return 2
    except OSError as error:
        _complain(f"cannot listen on {args.socket}: {error.strerror or error}")
        return 1


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # all is closed; at an ordinary exit torch's libraries take their time and print leak reports
