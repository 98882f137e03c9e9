# SPDX-License-Identifier: Apache-2.0
"""What the device sides of templates share: types, fake arguments, small warp helpers."""

import math

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32}

# Percent of an SM for shared memory, the same for all kernels that may run side by side, so that none of them asks an
# SM for another split than the others left. (Measured: it makes no difference in a layer.)
CARVEOUT = 100


def fake(dtype, shape, align=16):
    """A row-major tensor to compile for; sizes are int or sym()."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def sym(divisibility=1):
    """A size known at the call; the same object used twice means equal sizes, which the call checks."""
    return cute.sym_int(divisibility=divisibility) if divisibility > 1 else cute.sym_int()


def syms(n):
    """As many sizes."""
    return tuple(sym() for _ in range(n))
