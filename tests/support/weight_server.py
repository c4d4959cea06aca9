"""A server of the weight routes whose engine is nothing but tensors, received by the engine's own transports."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from blake3 import blake3

from rollspan.digest import weight_digest
from rollspan.errors import RollspanError
from rollspan.weights import transfer
from rollspan.weights.transfer.base import TransferContext, Transport
from rollspan.weights.transfer.delta import apply_deltas

Fault = Callable[["WeightServer"], "str | None"]


def error(reason: str) -> RollspanError:
    return RollspanError(f"scripted {reason}", reason=reason)


class WeightServer:
    """Serves on a thread while it is a context.

    Attributes:
        weights: in force, by name.
        requests: method and path of each, in order.
        headers: of the last request.
        faults: route -> what to do before one request each: None to go on, else raises; see :meth:`fail`.
        lost: routes whose next answer is lost after the request was carried out.
    """

    def __init__(self, weights: dict[str, torch.Tensor], root: Path | None = None, dtype: str = "float32") -> None:
        self.weights = dict(weights)
        self.label, self.commit = "default", 0
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.faults: dict[str, list[Callable[[], None]]] = {}
        self.lost: list[str] = []
        self.staged: dict[str, torch.Tensor] | None = None
        self.bodies: dict[str, Any] = {}
        self._dtype = dtype
        self._directory = tempfile.TemporaryDirectory()
        self.spool = Path(self._directory.name)
        facts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
        self._context = TransferContext(root, self.spool, torch.device("cpu"), 0, 1, 20.0, facts)
        self.joined: Transport | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> WeightServer:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if self.joined is not None:
            self.joined.close()
        self._directory.cleanup()

    def fail(self, route: str, reason: str) -> None:
        """The next request of the route is answered with an error."""

        def fault() -> None:
            raise error(reason)

        self.faults.setdefault(route, []).append(fault)

    def carry_out(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        self.requests.append(f"{method} {path}")
        self.headers = headers
        route = f"{method} /{path.split('/')[1]}"
        if self.faults.get(route):
            self.faults[route].pop(0)()
        if match := re.fullmatch(r"/weight_uploads/([\w.-]+)(?:/([\w.-]+))?", path):
            return self._upload(method, self.spool / match[1], match[2], body, headers)
        fields = json.loads(body) if body else {}
        self.bodies[path] = fields
        name = "on_" + path.strip("/")
        return getattr(self, name)(fields)

    def _upload(self, method: str, directory: Path, file: str | None, body: bytes, headers: dict[str, str]) -> Any:
        if method == "DELETE":
            for path in directory.glob("*"):
                path.unlink()
            if directory.exists():
                directory.rmdir()
            return {"status": "deleted"}
        first, last, total = map(int, re.findall(r"\d+", headers["content-range"]))
        assert headers["x-checksum"] == f"blake3:{blake3(body).hexdigest()}"
        assert len(body) == last + 1 - first
        directory.mkdir(exist_ok=True)
        part = directory / f"{file}.part"
        with part.open("ab" if first else "wb") as stream:
            stream.truncate(first)
            stream.write(body)
        if last + 1 == total:
            part.rename(directory / str(file))
        return {}

    def on_get_world_size(self, _: Any) -> Any:
        return {"world_size": 1}

    def on_server_info(self, _: Any) -> Any:
        return {"vllm_config": {"model_config": {"dtype": self._dtype}}}

    def on_init_weight_transfer_engine(self, body: Any) -> None:
        info = dict(body["init_info"])
        self.joined = transfer.create(info.pop("backend"), self._context)
        self.joined.init(info)

    def on_shutdown_weight_transfer_engine(self, _: Any) -> None:
        joined, self.joined = self.joined, None
        if joined is not None:
            joined.cancel()
            joined.close()

    def on_start_weight_update(self, _: Any) -> None:
        if self.staged is not None:
            raise error("update_active")
        self.staged = {}

    def on_update_weights(self, body: Any) -> None:
        assert self.staged is not None
        info = dict(body["update_info"])
        name, delta = info.pop("backend"), info.pop("delta", None)
        if delta is not None and delta["base_digest"] != weight_digest(self.weights):
            raise error("base_mismatch")
        needs_init = self.joined is not None and self.joined.name == name
        transport = self.joined if needs_init else transfer.create(name, self._context)
        assert transport is not None
        received = transport.receive(info)
        for key, tensor in apply_deltas(received, self.weights) if delta is not None else received:
            self.staged[key] = tensor.to(self.weights[key].dtype)

    def on_finish_weight_update(self, body: Any) -> Any:
        label = body.get("weight_version")
        if self.staged is None:
            if label == self.label:
                return self._answer()
            raise error("no_update_active")
        new, self.staged = {**self.weights, **self.staged}, None
        digest = body.get("weight_digest")
        if digest is not None and digest != weight_digest(new):
            raise error("digest_mismatch")
        self.weights, self.commit, self.label = new, self.commit + 1, label or self.label
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        digest = weight_digest(self.weights)
        return {"weight_version": self.label, "weight_commit": self.commit, "weight_digest": digest}

    def on_abort_weight_update(self, _: Any) -> Any:
        self.staged = None
        return {"status": "aborted"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                try:
                    status, content = 200, server.carry_out(self.command, self.path, body, headers)
                except RollspanError as refusal:
                    status, content = refusal.status, refusal.body()
                if self.path in server.lost:
                    server.lost.remove(self.path)
                    self.close_connection = True
                    return
                data = json.dumps(content).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client is gone
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 (the names that the library calls)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
