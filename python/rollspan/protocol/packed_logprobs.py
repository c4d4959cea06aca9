"""PackedLogprobs: the log-probs of one token as they stand on the wire, cut out of one buffer for a whole step."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from rollspan.protocol.messages import LogprobsLists
from rollspan.protocol.strict import EXT_RAW, pack


@dataclass(frozen=True, eq=False)
class Layout:
    """What the LogprobsLists of one position look like on the wire, for one number of columns.

    Attributes:
        columns: the sampled token's included.
        blank: the MessagePack of one whose numbers are 0.
        record: of as many bytes, with the fields ``token_ids`` and ``logprobs`` (``[columns]``) and ``rank``.
        numbers: all of these as Python's numbers.
    """

    columns: int
    blank: bytes
    record: np.dtype[np.void]
    numbers: struct.Struct

    def read(self, data: bytes) -> LogprobsLists:
        """The positions whose bytes stand one after the other in ``data``, as arrays of their own."""
        records = np.frombuffer(data, self.record)
        return LogprobsLists(records["token_ids"].copy(), records["logprobs"].copy(), records["rank"].copy())


class PackedLogprobs(LogprobsLists):
    """LogprobsLists of one position that are arrays only for who reads them; they can't be changed.

    It has no tie to the arrays of its step: who keeps it does not keep those of the other requests.

    Attributes:
        layout: of ``data``.
        data: MessagePack, as within an OUTPUTS message.
    """

    __slots__ = ("data", "layout")

    def __init__(self, layout: Layout, data: bytes) -> None:
        self.layout = layout
        self.data = data

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:  # type: ignore[override]  # read-only here
        """int32 ``[1, k + 1]``."""
        return self.layout.read(self.data).token_ids

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:  # type: ignore[override]
        """float32 ``[1, k + 1]``."""
        return self.layout.read(self.data).logprobs

    @property
    def sampled_ranks(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        """int32 ``[1]``."""
        return self.layout.read(self.data).sampled_ranks

    @property
    def sampled_logprob(self) -> float:
        """Log-prob of the token itself."""
        value: float = self.layout.numbers.unpack(self.data)[self.layout.columns]
        return value

    def __len__(self) -> int:
        return 1

    def __reduce__(self) -> tuple[Any, ...]:
        lists = self.layout.read(self.data)
        return LogprobsLists, (lists.token_ids, lists.logprobs, lists.sampled_ranks)


def pack_each(lists: LogprobsLists) -> list[PackedLogprobs]:
    """Each position of ``lists`` by itself. Python runs for a position only to make its object."""
    count, columns = lists.token_ids.shape
    layout = layout_of(columns)
    buffer = bytearray(layout.blank * count)
    records = np.frombuffer(buffer, layout.record)
    records["token_ids"], records["logprobs"], records["rank"] = lists.token_ids, lists.logprobs, lists.sampled_ranks
    data, size = bytes(buffer), len(layout.blank)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return list(map(PackedLogprobs, repeat(layout), pieces))


def join(lists: Sequence[LogprobsLists]) -> list[LogprobsLists]:
    """The positions of all of ``lists`` in this order: as one where all have the same number of columns."""
    if len(lists) <= 1:
        return list(lists)
    layouts = {one.layout if isinstance(one, PackedLogprobs) else None for one in lists}
    layout = layouts.pop()
    if not layouts and layout is not None:
        return [layout.read(b"".join([one.data for one in lists if isinstance(one, PackedLogprobs)]))]
    arrays = [one.layout.read(one.data) if isinstance(one, PackedLogprobs) else one for one in lists]
    if len({one.token_ids.shape[1] for one in arrays}) > 1:
        return arrays
    return [
        LogprobsLists(
            np.concatenate([one.token_ids for one in arrays]),
            np.concatenate([one.logprobs for one in arrays]),
            np.concatenate([one.sampled_ranks for one in arrays]),
        )
    ]


def numbers_of(lists: LogprobsLists) -> Iterator[tuple[Sequence[int], Sequence[float], int]]:
    """Token ids, log-probs and rank of each position, as Python's numbers."""
    if isinstance(lists, PackedLogprobs):
        columns, numbers = lists.layout.columns, lists.layout.numbers.unpack(lists.data)
        yield numbers[:columns], numbers[columns:-1], numbers[-1]
    else:
        yield from zip(lists.token_ids.tolist(), lists.logprobs.tolist(), lists.sampled_ranks.tolist(), strict=True)


@lru_cache(maxsize=256)
def layout_of(columns: int) -> Layout:
    """The layout for that many columns, the sampled token's included."""
    blank, numbers, offsets = b"", "<", []
    for head, count, kind in zip(before_arrays((1, columns)), (columns, columns, 1), "ifi", strict=True):
        offsets.append(len(blank) + len(head))
        blank += head + bytes(4 * count)
        numbers += f"{len(head)}x{count}{kind}"
    blank += b"\xc0"
    record = np.dtype(
        {
            "names": ["token_ids", "logprobs", "rank"],
            "formats": [("<i4", (columns,)), ("<f4", (columns,)), "<i4"],
            "offsets": offsets,
            "itemsize": len(blank),
        }
    )
    return Layout(columns, blank, record, struct.Struct(numbers + "x"))


@lru_cache(maxsize=256)
def before_arrays(shape: tuple[int, ...]) -> tuple[bytes, bytes, bytes]:
    """What stands before the data of each of the three arrays of LogprobsLists whose token ids have this shape."""

    def head(dtype: str, shape: tuple[int, ...]) -> bytes:
        data = bytes(4 * int(np.prod(shape)))
        packed = pack((dtype, shape, msgpack.ExtType(EXT_RAW, data)))
        return packed[: len(packed) - len(data)]

    return b"\x94" + head("<i4", shape), head("<f4", shape), head("<i4", shape[:1])
