"""rollspan: rollouts for RL post-training, where every output token carries proof of which weights sampled it.

Importing this package costs nothing: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollspan.async_llm import AsyncLLM
    from rollspan.config import EngineConfig
    from rollspan.errors import RollspanError
    from rollspan.llm import LLM
    from rollspan.output_processor import RequestFailedError
    from rollspan.outputs import CompletionOutput, Logprob, RequestOutput
    from rollspan.provenance import Provenance
    from rollspan.sampling_params import RequestOutputKind, SamplingParams
    from rollspan.spans import CommitSpan, KvVersionBuilder, KvVersionSpan, SpanBuilder, VersionSpan, WeightSpan
    from rollspan.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "CommitSpan",
    "CompletionOutput",
    "EngineConfig",
    "KvVersionBuilder",
    "KvVersionSpan",
    "Logprob",
    "Provenance",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "RollspanError",
    "SamplingParams",
    "SpanBuilder",
    "VersionSpan",
    "WeightSpan",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CommitSpan": "spans",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "KvVersionBuilder": "spans",
    "KvVersionSpan": "spans",
    "Logprob": "outputs",
    "Provenance": "provenance",
    "RequestFailedError": "output_processor",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "RollspanError": "errors",
    "SamplingParams": "sampling_params",
    "SpanBuilder": "spans",
    "VersionSpan": "spans",
    "WeightSpan": "spans",
    "__version__": "version",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rollspan.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
