"""CheckpointNames: tensors as a checkpoint has them, made into parameters as transformers does on load."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from rollspan.errors import RollspanError, cut


class CheckpointNames:
    """What transformers does to a checkpoint of a model when it loads it: renames tensors, and merges those of experts.

    Args:
        model: any module; only transformers' own models have names of both kinds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = model.state_dict(keep_vars=True)
        self._prefix = getattr(model, "base_model_prefix", None)
        transforms = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}

    def target(self, name: str) -> str | None:
        """The parameter that a checkpoint's tensor becomes or becomes part of; None where there is none."""
        target = self._rename(name)[0]
        return target if target in self._known else None

    def _rename(self, name: str) -> tuple[str, str | None]:
        return rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by the model's names.

        Args:
            tensors: by names that have a :meth:`target`; all parts of a parameter at once.

        Raises:
            RollspanError: ``weights_invalid``: tensors cannot be merged.
        """
        result: dict[str, torch.Tensor] = {}
        merged: dict[str, WeightConverter] = {}
        stacked: dict[tuple[str, str], list[str]] = {}
        for name in sorted(tensors, key=dot_natural_key):  # experts are stacked in order of their numbers
            target, pattern = self._rename(name)
            if pattern is None:
                if target in result:
                    text = f"tensor {target!r} came under two names, {cut(name)!r} and another"
                    raise RollspanError(text, reason="weights_invalid", param="update_info")
                result[target] = tensors[name]
            else:
                stacked.setdefault((target, pattern), []).append(name)
                converter = merged.setdefault(target, copy.deepcopy(self._by_pattern[pattern]))
                part: Any = tensors[name]
                converter.add_tensor(target, name, pattern, part)
        for (target, _), names in stacked.items():
            _check_numbers(target, names)
        for target, converter in merged.items():
            try:
                found = converter.convert(target, model=self._model, config=self._model.config)
            except Exception as error:  # the operations raise anything
                text = f"the tensors of {target!r} cannot be merged: {type(error).__name__}: {error}"
                raise RollspanError(text, reason="weights_invalid", param="update_info") from error
            result.update({name: value[0] if isinstance(value, list) else value for name, value in found.items()})
        return result


def _check_numbers(target: str, names: list[str]) -> None:
    """Refuses numbers of experts that are not 0, 1, and so on: whatever they are, experts are stacked in their order.

    Raises:
        RollspanError: ``weights_invalid``.
    """
    columns = zip(*(map(int, re.findall(r"\d+", name)) for name in names), strict=True)
    varying = [sorted(column) for column in columns if len(set(column)) > 1]
    if len(varying) > 1 or (len(names) > 1 and varying != [list(range(len(names)))]):
        ends = f"{cut(names[0])!r} to {cut(names[-1])!r}"
        text = f"the {len(names)} tensors that {target!r} is made of must be numbered from 0 on, got {ends}"
        raise RollspanError(text, reason="weights_invalid", param="update_info")
