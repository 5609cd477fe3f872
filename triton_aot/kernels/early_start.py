"""Kernels that are launched before the ones ahead of them have ended (sm_90 and newer).

A kernel that waits by itself is marked in the manifest and launched so that its blocks are placed
while earlier kernels end; what it does before the wait must touch nothing that those write, nor
anything that they still read. cuda/include/common.cuh has the same for CUDA C++.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier_kernels():
    """Returns when the kernels before this one have ended; before that, the next one may be placed
    as soon as all blocks of this one are."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def prefetch_rows(pointers, LENGTH: tl.constexpr):
    """Asks for LENGTH bf16 from each pointer on to come to L2. Pointers and 2 * LENGTH: multiples of
    16 bytes."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, 2 * LENGTH, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
