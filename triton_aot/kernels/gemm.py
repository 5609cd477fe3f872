"""GEMM: out[m, n] = sum_k x[m, k] * w[n, k], bf16 operands, fp32 accumulation.

    x    act  [M, K]      activations, row-major
    w    bf16 [N, K]      weight as stored; [2N, K], N gate rows then N up rows, with SILU_MUL
    out  act  [M, N], or fp32 [S, M, N]: segment s holds the sum over its own part of K

Two kernels, one order of summation. Each output is one accumulator that takes the K products of
its segment in ascending order, 16 at a time in the tensor core, whatever the tile; so the fp32 bits
of a row depend on neither M nor the tile (which tools/gpu_check.py tests, because it is a property
of the hardware and not of this text). Two calls that must agree may thus differ in the tile, never
in the segments.

    gemm_stream_kernel      few rows: the weight is the left operand of the tensor core, so that a
                            tile of 64 weight rows goes with as few as 16 rows of x. One program a
                            tile; all a program does is stream its weight rows once.
    gemm_persistent_kernel  many rows: x is the left operand, tiles of both come in through tensor
                            descriptors, and each program walks over many output tiles.

SILU_MUL: out = silu(x gate^T) * (x up^T); both products, the silu and the result are rounded to act
(spec section 3.3). K and SEGMENT are multiples of BLOCK_K; M and N are free.

Check: tests/test_triton_gemm.py (interpreter), tools/gpu_check.py --only gemm. Time: the same.
"""

import triton
import triton.language as tl

from .early_start import prefetch_rows, wait_for_earlier_kernels


@triton.jit
def silu_mul(gate, up, act: tl.constexpr):
    """silu(gate) * up with act roundings of both operands and of silu; fp32 in, fp32 out."""
    gate = gate.to(act).to(tl.float32)
    up = up.to(act).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    return silu.to(act).to(tl.float32) * up


@triton.jit
def gemm_stream_kernel(
    x,
    w,
    out,
    M,
    N,
    K,
    SEGMENT,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    EARLY_START: tl.constexpr,
    PREFETCH_K: tl.constexpr,
):
    """Grid (ceil(M / BLOCK_M), ceil(N / columns), segments): programs that share weight rows are
    neighbours. `columns` is BLOCK_N, with SILU_MUL half of it: the tile then holds gate and up rows
    of the same outputs, and one product serves both."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * COLUMNS
    segment = tl.program_id(2)

    # Rows past the end read the last row again and are not stored: no load is predicated.
    tile_n = tl.arange(0, BLOCK_N)
    if SILU_MUL:
        weight_rows = tl.minimum(first_n + tile_n % COLUMNS, N - 1) + (tile_n // COLUMNS) * N
    else:
        weight_rows = tl.minimum(first_n + tile_n, N - 1)
    x_rows = tl.minimum(first_m + tl.arange(0, BLOCK_M), M - 1)
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, K)
    if EARLY_START:
        # the weight is nobody's output: its first part may come while earlier kernels end
        if PREFETCH_K > 0:
            prefetch_rows(w + weight_rows * K + begin, PREFETCH_K)
        wait_for_earlier_kernels()
    tile_k = tl.arange(0, BLOCK_K)
    w_tile = w + weight_rows[:, None] * K + (begin + tile_k)[None, :]
    x_tile = x + x_rows[None, :] * K + (begin + tile_k)[:, None]

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(begin, end, BLOCK_K):
        acc = tl.dot(tl.load(w_tile), tl.load(x_tile), acc)
        w_tile += BLOCK_K
        x_tile += BLOCK_K

    act: tl.constexpr = out.dtype.element_ty
    if SILU_MUL:
        pair = tl.permute(tl.reshape(acc, (2, COLUMNS, BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(pair)
        acc = silu_mul(gate, up, act)
    n = first_n + tl.arange(0, COLUMNS)
    m = first_m + tl.arange(0, BLOCK_M)
    target = out + segment * M * N + m[:, None] * N + n[None, :]
    tl.store(target, tl.trans(acc).to(act), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile (m, n) of a running index: down GROUP_M row tiles, then the next column of tiles, so
    that the programs at work at one time share their x and w tiles in L2."""
    group = index // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    size = tl.minimum(tiles_m - first_m, GROUP_M)
    within = index - group * GROUP_M * tiles_n
    return first_m + within % size, within // size


@triton.jit
def gemm_persistent_kernel(
    x,
    w,
    out,
    M,
    N,
    K,
    SEGMENT,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    GROUP_M: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    """Grid: any number of programs, normally one a multiprocessor. BLOCK_N counts weight rows, gate
    and up together. The tensor descriptors lie in the kernel's global scratch."""
    act: tl.constexpr = out.dtype.element_ty
    # fp32 outputs come in segments that a tile may not run across, so they are stored by masks.
    STORE_TILE: tl.constexpr = act.primitive_bitwidth == 16
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    if EARLY_START:
        wait_for_earlier_kernels()  # before the descriptors: their scratch is every kernel's
    x_desc = tl.make_tensor_descriptor(x, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    if SILU_MUL:
        # one load brings the gate rows and the up rows of a tile
        w_desc = tl.make_tensor_descriptor(w, [2, N, K], [N * K, K, 1], [2, COLUMNS, BLOCK_K])
    else:
        w_desc = tl.make_tensor_descriptor(w, [N, K], [K, 1], [COLUMNS, BLOCK_K])
    if STORE_TILE:
        out_desc = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, COLUMNS])

    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, COLUMNS)
    segments = tl.cdiv(K, SEGMENT)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n * segments, tl.num_programs(0)):
        segment = index // (tiles_m * tiles_n)
        tile_m, tile_n = tile_of(index - segment * tiles_m * tiles_n, tiles_m, tiles_n, GROUP_M)
        first_m = tile_m * BLOCK_M
        first_n = tile_n * COLUMNS
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(begin, end, BLOCK_K):
            x_tile = x_desc.load([first_m, k])
            if SILU_MUL:
                w_tile = tl.reshape(w_desc.load([0, first_n, k]), (BLOCK_N, BLOCK_K))
            else:
                w_tile = w_desc.load([first_n, k])
            acc = tl.dot(x_tile, w_tile.T, acc)
        if SILU_MUL:
            pair = tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLUMNS)), (0, 2, 1))
            gate, up = tl.split(pair)
            acc = silu_mul(gate, up, act)
        if STORE_TILE:
            out_desc.store([first_m, first_n], acc.to(act))
        else:
            m = first_m + tl.arange(0, BLOCK_M)
            n = first_n + tl.arange(0, COLUMNS)
            target = out + segment * M * N + m[:, None] * N + n[None, :]
            tl.store(target, acc, mask=(m < M)[:, None] & (n < N)[None, :])
