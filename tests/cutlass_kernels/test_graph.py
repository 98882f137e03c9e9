# SPDX-License-Identifier: Apache-2.0
"""Recording CUDA graphs; their times are a GPU's."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from cutlass_kernels.graph import recorded


@pytest.mark.parametrize("left", [KeyboardInterrupt("Ctrl-C"), ValueError("a fault of body"), None], ids=repr)
def test_what_ends_a_capture_is_what_was_raised_in_it(
    left: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that is left half way fails at its end, too; that says nothing of why."""

    @contextmanager
    def capture(graph: object, pool: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capturing stream has unjoined work")

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    for name, value in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda s: nullcontext(), "synchronize": lambda: None,
        "CUDAGraph": object, "graph": capture,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    calls: list[int] = []

    def body() -> None:
        calls.append(0)
        if len(calls) == 2 and left is not None:
            raise left

    with pytest.raises(type(left) if left is not None else RuntimeError) as error:
        recorded(body)
    assert str(error.value) == (str(left) if left is not None else "capturing stream has unjoined work")
