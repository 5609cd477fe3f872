"""GEMM: out[m, n] = sum_k x[m, k] * w[n, k], bf16 operands, fp32 accumulation.

    x    act  [M, K]      activations, row-major
    w    bf16 [N, K]      weight as stored; [2N, K], N gate rows then N up rows, with SILU_MUL
    out  act  [M, N], or fp32 [S, M, N]: segment s holds the sum over its own part of K

Three kernels, one order of summation. Each output is one accumulator that takes the K products of
its segment in ascending order, 16 at a time in the tensor core, whatever the tile; so the fp32 bits
of a row depend on neither M nor the tile (which tools/gpu_check.py tests, because it is a property
of the hardware and not of this text). Two calls that must agree may thus differ in the tile, never
in the segments.

    gemm_stream_kernel      few rows: the weight is the left operand of the tensor core, so that a
                            tile of 64 weight rows goes with as few as 16 rows of x. One program a
                            tile; all a program does is stream its weight rows once.
    gemm_grouped_kernel     the same for groups of rows that each have their own weight.
    gemm_persistent_kernel  many rows: x is the left operand, tiles of both come in through tensor
                            maps made on the host, and each program walks over many output tiles.

SILU_MUL: out = silu(x gate^T) * (x up^T); both products, the silu and the result are rounded to act
(spec section 3.3). K and SEGMENT are multiples of BLOCK_K; M and N are free.

Check: tests/test_triton_gemm.py (interpreter), tools/gpu_check.py --only gemm invariance.
Time: tools/bench_ops.py --only linear.
"""

import triton
import triton.language as tl

from .early_start import wait_for_earlier_kernels


@triton.jit
def silu_mul(gate, up, act: tl.constexpr):
    """silu(gate) * up with act roundings of both operands and of silu; fp32 in, fp32 out."""
    gate = gate.to(act).to(tl.float32)
    up = up.to(act).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    return silu.to(act).to(tl.float32) * up


@triton.jit
def stream_tile(
    x,
    w,
    out,
    first_m,
    end_m,
    first_n,
    N,
    K,
    begin,
    end,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    """One tile of `gemm_stream_kernel`: rows first_m to end_m of x and out, columns first_n on, K
    from begin to end."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    # Weight rows past the end read the last row again, so that no such load is predicated.
    # Those of x are not read: all programs would ask for one row at one time, again and again.
    tile_n = tl.arange(0, BLOCK_N)
    if SILU_MUL:
        weight_rows = tl.minimum(first_n + tile_n % COLUMNS, N - 1) + (tile_n // COLUMNS) * N
    else:
        weight_rows = tl.minimum(first_n + tile_n, N - 1)
    m = first_m + tl.arange(0, BLOCK_M)
    tile_k = tl.arange(0, BLOCK_K)
    w_tile = w + weight_rows[:, None] * K + (begin + tile_k)[None, :]
    x_tile = x + m[None, :] * K + (begin + tile_k)[:, None]

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(begin, end, BLOCK_K):
        acc = tl.dot(tl.load(w_tile), tl.load(x_tile, mask=(m < end_m)[None, :], other=0.0), acc)
        w_tile += BLOCK_K
        x_tile += BLOCK_K

    act: tl.constexpr = out.dtype.element_ty
    if SILU_MUL:
        pair = tl.permute(tl.reshape(acc, (2, COLUMNS, BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(pair)
        acc = silu_mul(gate, up, act)
    n = first_n + tl.arange(0, COLUMNS)
    target = out + m[:, None] * N + n[None, :]
    tl.store(target, tl.trans(acc).to(act), mask=(m < end_m)[:, None] & (n < N)[None, :])


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
):
    """Grid (ceil(M / BLOCK_M), ceil(N / columns), segments): programs that share weight rows are
    neighbours. `columns` is BLOCK_N, with SILU_MUL half of it: the tile then holds gate and up rows
    of the same outputs, and one product serves both."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    segment = tl.program_id(2)
    begin = segment * SEGMENT
    if EARLY_START:
        wait_for_earlier_kernels()
    stream_tile(
        x,
        w,
        out + segment * M * N,
        tl.program_id(0) * BLOCK_M,
        M,
        tl.program_id(1) * COLUMNS,
        N,
        K,
        begin,
        tl.minimum(begin + SEGMENT, K),
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
        SILU_MUL,
    )


@triton.jit
def gemm_grouped_kernel(
    x,
    w,
    out,
    group_starts,
    GROUPS,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    """Several weights in one launch: rows group_starts[g] to group_starts[g + 1] of x go with
    w[g] of [GROUPS, N, K] (SILU_MUL: [GROUPS, 2 N, K]); a group may be empty. A row's bits are
    those of `gemm_stream_kernel` with that weight. Grid (M // BLOCK_M + GROUPS, ceil(N / columns)):
    at least as many row tiles as there can be; the rest return."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    tile = tl.program_id(0)
    if EARLY_START:
        wait_for_earlier_kernels()
    groups = tl.arange(0, MAX_GROUPS)
    starts = tl.load(group_starts + groups, mask=groups < GROUPS, other=0)
    ends = tl.load(group_starts + groups + 1, mask=groups < GROUPS, other=0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if group < GROUPS:
        within = tile - tl.sum(tl.where(groups < group, tiles, 0), 0)
        weight_size = (2 if SILU_MUL else 1) * N.to(tl.int64) * K
        stream_tile(
            x,
            w + group * weight_size,
            out,
            tl.load(group_starts + group) + within * BLOCK_M,
            tl.load(group_starts + group + 1),
            tl.program_id(1) * COLUMNS,
            N,
            K,
            0,
            K,
            BLOCK_N,
            BLOCK_M,
            BLOCK_K,
            SILU_MUL,
        )


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
def weight_tile(w_map, first_n, k, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PAIR: tl.constexpr):
    """[ROWS, BLOCK_K] of the weight; PAIR: one load brings ROWS / 2 gate and ROWS / 2 up rows."""
    if PAIR:
        return tl.reshape(w_map.load([0, first_n, k]), (ROWS, BLOCK_K))
    else:
        return w_map.load([first_n, k])


@triton.jit
def rounded(acc, act: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIR: tl.constexpr):
    """What is stored of a tile's sums, [ROWS, COLUMNS]."""
    if PAIR:
        pair = tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS)), (0, 2, 1))
        gate, up = tl.split(pair)
        acc = silu_mul(gate, up, act)
    return acc.to(act)


@triton.jit
def store_rows(out, tile, first_m, first_n, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    m = first_m + tl.arange(0, ROWS)
    n = first_n + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], tile, mask=inside)


@triton.jit
def gemm_persistent_kernel(
    x_map,
    w_map,
    extra_map,
    out_map,
    out,
    M,
    N,
    K,
    SEGMENT,
    BLOCK_N: tl.constexpr,
    EXTRA_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    GROUP_M: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    """Grid: any number of programs, normally one a multiprocessor. A tile has BLOCK_N weight rows,
    gate and up together, and EXTRA_N more as a second product with the same rows of x, so that a
    tile need not be a power of two wide and the tiles of a shape can fill every multiprocessor.

    x_map, w_map, extra_map: tensor maps of x [M, K] and w [N, K] (SILU_MUL: [2, N, K]) in blocks of
    BLOCK_M, BLOCK_N and EXTRA_N rows. out_map: of out [M, N] in blocks of a tile, or None, where
    out has segments, which a block may not run across, or a tile is two blocks."""
    act: tl.constexpr = out.dtype.element_ty
    GATES: tl.constexpr = 2 if SILU_MUL else 1
    COLUMNS: tl.constexpr = BLOCK_N // GATES
    EXTRA: tl.constexpr = EXTRA_N // GATES
    if EARLY_START:
        wait_for_earlier_kernels()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, COLUMNS + EXTRA)
    tiles = tiles_m * tiles_n * tl.cdiv(K, SEGMENT)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=EXTRA_N > 0):
        segment = index // (tiles_m * tiles_n)
        tile_m, tile_n = tile_of(index - segment * tiles_m * tiles_n, tiles_m, tiles_n, GROUP_M)
        first_m = tile_m * BLOCK_M
        first_n = tile_n * (COLUMNS + EXTRA)
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if EXTRA_N:
            extra = tl.zeros((BLOCK_M, EXTRA_N), tl.float32)
        for k in range(begin, end, BLOCK_K):
            x_tile = x_map.load([first_m, k])
            w_tile = weight_tile(w_map, first_n, k, BLOCK_N, BLOCK_K, SILU_MUL)
            acc = tl.dot(x_tile, w_tile.T, acc)
            if EXTRA_N:
                w_tile = weight_tile(extra_map, first_n + COLUMNS, k, EXTRA_N, BLOCK_K, SILU_MUL)
                extra = tl.dot(x_tile, w_tile.T, extra)
        tile = rounded(acc, act, BLOCK_M, COLUMNS, SILU_MUL)
        target = out + segment * M * N
        if EXTRA_N:
            more = rounded(extra, act, BLOCK_M, EXTRA, SILU_MUL)
            store_rows(target, tile, first_m, first_n, M, N, BLOCK_M, COLUMNS)
            store_rows(target, more, first_m, first_n + COLUMNS, M, N, BLOCK_M, EXTRA)
        elif out_map is None:
            store_rows(target, tile, first_m, first_n, M, N, BLOCK_M, COLUMNS)
        else:
            out_map.store([first_m, first_n], tile)
