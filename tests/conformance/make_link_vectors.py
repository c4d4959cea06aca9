"""Writes link.json: messages of the engine link, what they mean, and messages that must be refused.

Run it after editing (`python tests/conformance/make_link_vectors.py`); a test holds the file to this script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
from link_accepted import accepted
from link_refused import refused

TARGET = Path(__file__).with_name("link.json")
NOTE = (
    "Messages of the engine link, version 1 (rust/protocol/PROTOCOL.md). 'accepted': payload frames in hex and the "
    "message's meaning; fields that are not shown have their default. 'refused': payload frames in hex and the stable "
    "reason of the refusal (null: any). 'framing': whole frames. Written by make_link_vectors.py."
)


def framing() -> dict[str, Any]:
    """Whole frames: those that are taken apart, and headers that end the link (limit: 1024 bytes)."""
    return {
        "limit": 1024,
        "accepted": [
            {"kind": 0x01, "payload": "91a27231", "frame": "000000050191a27231"},
            {"kind": 0x21, "payload": "c0", "frame": "0000000221c0"},
            {"kind": 0x22, "payload": "", "frame": "0000000122"},
        ],
        "refused": ["0000000001", "0000040121", "ffffffff21", "0000000202c0", "00000002ffc0"],
    }


def build() -> dict[str, Any]:
    """The whole file."""

    def frames(structure: Any) -> list[str]:
        return [(structure if isinstance(structure, bytes) else msgpack.packb(structure)).hex()]

    return {
        "note": NOTE,
        "accepted": [
            {"kind": kind, "title": title, "frames": frames(structure), "meaning": meaning}
            for kind, title, structure, meaning in accepted()
        ],
        "refused": [
            {"kind": kind, "title": title, "frames": frames(structure), "reason": reason}
            for kind, title, structure, reason in refused()
        ],
        "framing": framing(),
    }


def render() -> str:
    """The text of the file: one case a line."""
    built = build()
    lines = ["{", f' "note": {json.dumps(built["note"])},']
    for part in ("accepted", "refused"):
        lines.append(f' "{part}": [')
        cases = [f"  {json.dumps(case, ensure_ascii=False)}" for case in built[part]]
        lines += [case + "," for case in cases[:-1]] + [cases[-1], " ],"]
    return "\n".join([*lines, f' "framing": {json.dumps(built["framing"])}', "}", ""])


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
