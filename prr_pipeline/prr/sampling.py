# SPDX-License-Identifier: Apache-2.0
"""The next token from logits: greedy, or temperature and top-p from a seeded stream of its own for each sample."""

import zlib

import torch
from torch import Tensor

_ONE = 1 << 40  # probability 1, as an integer


def draw(logits: Tensor, u: Tensor | None, temperature: float, top_p: float) -> Tensor:
    """The token at the u-th part of the nucleus' mass; greedy without u. On any device, without a host sync.

    Masses are summed as integers: a sum of floats depends on its order, which a GPU does not promise.

    Args:
        logits: [1, vocab].
        u: [1] in [0, 1), or None.
        temperature: above 0 if there is a u.
        top_p: mass of the nucleus, in (0, 1]; the first token that reaches it is inside.

    Returns:
        [1] int64; of equal logits the lowest id comes first.
    """
    if u is None:
        return logits.argmax(-1)
    p = torch.softmax(logits[0].float() / temperature, -1)
    ordered, ids = p.sort(descending=True, stable=True)
    mass = (ordered.double() * _ONE).long()
    below = mass.cumsum(0) - mass
    mass = torch.where(below < top_p * _ONE, mass, 0)
    upto = mass.cumsum(0)
    place = (upto <= u.double() * upto[-1]).sum()
    return ids.index_select(0, place[None])


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

    @property
    def greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0

    def uniforms(self, n: int) -> Tensor:
        """The next n random numbers of the stream, [n] float64 on the CPU."""
        return torch.rand(n, dtype=torch.float64, generator=self.generator)

    def __call__(self, logits: Tensor) -> int:
        """logits: [1, vocab] -> a token id."""
        u = None if self.greedy else self.uniforms(1).to(logits.device)
        return int(draw(logits, u, self.temperature, self.top_p))
