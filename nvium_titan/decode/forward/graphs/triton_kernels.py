"""The Triton kernels of `decode.forward.graphs.fused`; importing this needs triton.

Every tensor is contiguous. Sums are in the type of the intermediate buffers: float32, or float64 in
a float64 model. Names in capitals are compiled in.
"""

import triton
import triton.language as tl

from nvium_titan.decode import noise

_GOLDEN = tl.constexpr(noise.GOLDEN)
_MIX_1 = tl.constexpr(noise.MIX_1)
_MIX_2 = tl.constexpr(noise.MIX_2)


@triton.jit
def norm_and_first_layer(
    states_ptr, position_ptr, gain_ptr, weight_ptr, bias_ptr, n_ptr, hidden_ptr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, EPS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write n = RMSNorm(h) and `ROWS` outputs of GELU(W n + b); every program makes its own n."""
    wide = hidden_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_WIDTH)
    is_column = columns < WIDTH
    start = tl.load(position_ptr) * WIDTH
    h = tl.load(states_ptr + start + columns, mask=is_column, other=0.0).to(wide)
    gain = tl.load(gain_ptr + columns, mask=is_column, other=0.0).to(wide)
    scale = 1.0 / tl.sqrt(tl.sum(h * h, axis=0) / WIDTH + EPS)
    n = (h * scale * gain).to(n_ptr.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(n_ptr + columns, n, mask=is_column)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < RANK
    weight = tl.load(
        weight_ptr + rows[:, None] * WIDTH + columns[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    ).to(wide)
    x = tl.sum(weight * n.to(wide)[None, :], axis=1)
    x += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(wide)
    gelu = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(hidden_ptr + rows, gelu, mask=is_row)


@triton.jit
def second_layer(
    hidden_ptr, weight_ptr, bias_ptr, leave_ptr, parts_ptr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the share of `ROWS` outputs s of the second layer in sum(leave s) and sum(s^2)."""
    wide = hidden_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_RANK)
    is_column = columns < RANK
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < WIDTH
    hidden = tl.load(hidden_ptr + columns, mask=is_column, other=0.0)
    weight = tl.load(
        weight_ptr + rows[:, None] * RANK + columns[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    ).to(wide)
    s = tl.sum(weight * hidden[None, :], axis=1)
    s += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(wide)
    leave = tl.load(leave_ptr + rows, mask=is_row, other=0.0)
    part = parts_ptr + tl.program_id(0)
    tl.store(part, tl.sum(leave * s, axis=0))
    tl.store(part + tl.num_programs(0), tl.sum(s * s, axis=0))


@triton.jit
def decide(
    parts_ptr, bias_ptr, threshold_ptr, router_logit_ptr, leaves_ptr, goes_on_ptr,
    WIDTH: tl.constexpr, EPS: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Write z = leave . RMSNorm(s) + bias from the parts, and whether it exceeds the threshold."""
    parts = tl.arange(0, BLOCK_PARTS)
    is_part = parts < NUM_PARTS
    score = tl.sum(tl.load(parts_ptr + parts, mask=is_part, other=0.0), axis=0)
    squares = tl.sum(tl.load(parts_ptr + NUM_PARTS + parts, mask=is_part, other=0.0), axis=0)
    z = score / tl.sqrt(squares / WIDTH + EPS) + tl.load(bias_ptr)
    threshold = tl.load(threshold_ptr)
    leaves = (z.to(tl.float64) > threshold) | (threshold == float("-inf"))
    tl.store(router_logit_ptr, z)
    tl.store(leaves_ptr, leaves)
    tl.store(goes_on_ptr, leaves == 0)


@triton.jit
def draw_in_blocks(
    logits_ptr, key_ptr, temperature_ptr, top_ptr, score_ptr, id_ptr, num_tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the largest logit of a block of ids, its best (logit - largest) / T + noise, and whose.

    The noise is that of `noise.gumbel_of_keys`. At T = 0 the best is the largest itself.
    """
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + ids, mask=ids < num_tokens, other=float("-inf")).to(tl.float64)
    top = tl.max(logits, axis=0)
    temperature = tl.load(temperature_ptr)
    x = tl.load(key_ptr).to(tl.uint64, bitcast=True) + (ids + 1).to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    uniform = ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    gumbel = -tl.log(-tl.log(uniform))
    is_greedy = temperature == 0.0
    drawn = (logits - top) / tl.where(is_greedy, 1.0, temperature) + gumbel
    scores = tl.where(is_greedy, logits, drawn)
    scores = tl.where(logits == float("-inf"), float("-inf"), scores)
    best = tl.max(scores, axis=0)
    best_id = tl.min(tl.where(scores == best, ids, num_tokens - 1), axis=0)
    tl.store(top_ptr + tl.program_id(0), top)
    tl.store(score_ptr + tl.program_id(0), best)
    tl.store(id_ptr + tl.program_id(0), best_id.to(tl.int64))


@triton.jit
def best_of_blocks(
    top_ptr, score_ptr, id_ptr, temperature_ptr, token_ptr, num_tokens, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the id of the best block, the first of equals; never one past the vocabulary."""
    blocks = tl.arange(0, BLOCK)
    is_block = blocks < num_blocks
    top = tl.load(top_ptr + blocks, mask=is_block, other=float("-inf"))
    score = tl.load(score_ptr + blocks, mask=is_block, other=float("-inf"))
    ids = tl.load(id_ptr + blocks, mask=is_block, other=0)
    temperature = tl.load(temperature_ptr)
    is_greedy = temperature == 0.0
    drawn = score + (top - tl.max(top, axis=0)) / tl.where(is_greedy, 1.0, temperature)
    score = tl.where(is_greedy, top, drawn)
    best = tl.max(score, axis=0)
    token = tl.min(tl.where((score == best) & is_block, ids, num_tokens - 1), axis=0)
    tl.store(token_ptr, token)
