"""Kernels that are launched before the ones ahead of them have ended (sm_90 and newer).

A kernel that waits by itself is marked in the manifest and launched so that its blocks are placed
while earlier kernels end; what it does before the wait must touch nothing that those write, nor
anything that they still read. cuda/include/common.cuh has the same for CUDA C++.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier_kernels():
    """Returns when the kernels before this one have ended; before that, the next one may be placed
    as soon as all blocks of this one are."""
    gdc_launch_dependents()
    gdc_wait()
