# SPDX-License-Identifier: Apache-2.0
"""The next token from logits: greedy, or temperature and top-p from a seeded stream of its own for each sample."""

import zlib

import torch
from torch import Tensor


class Sampler:
    """Draws tokens; equal logits give equal tokens in every mode.

    Args:
        temperature: 0 is greedy (ties to the lowest id).
        top_p: mass of the nucleus, in (0, 1].
        seed, key: of the stream; the key is the sample's id.
    """

    def __init__(self, temperature: float, top_p: float, seed: int, key: str):
        self.temperature, self.top_p = temperature, top_p
        # The CPU's generator takes 32 bits of a seed: both must be in them.
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))

    def __call__(self, logits: Tensor) -> int:
        """logits: [1, vocab] -> a token id."""
        if self.temperature == 0:
            return int(logits[0].argmax())
        p = torch.softmax(logits[0].float().cpu() / self.temperature, -1)
        ordered, ids = p.sort(descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= self.top_p  # the first token that reaches top_p is inside
        ordered[outside] = 0
        return int(ids[torch.multinomial(ordered, 1, generator=self.generator)])
