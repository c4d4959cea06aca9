"""The task the embedded models are trained on: 2-digit addition, verifiable by arithmetic.

A document is ``<bos>12+34=46<eos>``: two operands from 10 to 99 and their sum in decimal. Tokens are characters.
One pair in ten is held out: training never sees it, evaluation sees nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+="
UNKNOWN_TOKEN = "<unk>"
VOCABULARY = (*SPECIAL_TOKENS, *CHARACTERS, UNKNOWN_TOKEN)
"""Token strings by id: 16 of them. Id 0 is padding, which a trained model never emits."""

PROMPT_TOKENS = 7
"""Length of every prompt: ``<bos>`` and six characters."""
ANSWER_TOKENS = 4
"""Longest answer: three digits and ``<eos>``."""

_ID_OF = {token: index for index, token in enumerate(VOCABULARY)}
_LOWEST, _HIGHEST = 10, 99


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum, ``left + right``, of two operands from 10 to 99."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def prompt_ids(self) -> list[int]:
        """``<bos>12+34=`` as token ids, always PROMPT_TOKENS of them."""
        return [BOS, *encode(self.prompt)]

    @property
    def answer_ids(self) -> list[int]:
        """``46<eos>`` as token ids, at most ANSWER_TOKENS of them."""
        return [*encode(self.answer), EOS]

    def is_solved_by(self, output_ids: Sequence[int]) -> bool:
        """Whether the output, up to and with its first ``<eos>``, is exactly the answer."""
        answer = self.answer_ids
        return list(output_ids[: len(answer)]) == answer


def encode(text: str) -> list[int]:
    """Token ids of a text made of CHARACTERS.

    Raises:
        KeyError: another character.
    """
    return [_ID_OF[character] for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens spelled out."""
    return "".join(VOCABULARY[token_id] for token_id in token_ids)


def split_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """All 8100 problems as (for training, held out), nine to one; the split depends on ``seed`` alone."""
    operands = range(_LOWEST, _HIGHEST + 1)
    problems = [Problem(left, right) for left in operands for right in operands]
    random.Random(seed).shuffle(problems)
    held_out = len(problems) // 10
    return problems[held_out:], problems[:held_out]
