"""Draw a token for each row of logits: the largest of logit / temperature + Gumbel noise, which is a softmax sample.

Shapes    logits: (B, V)   rows, counts: (B,) int32   seed: (1,) int64   banned: (V,) bool   tokens: (B,) int64
Method    each program finds the best of a tile of one row; a second launch takes the best tile. Noise is Philox of
          (seed, column, count, row), so a draw depends neither on the row's place in a batch nor on what else is drawn.
          `note_tokens` writes down what was drawn, for all rows in one launch.
Numerics  fp32. Noise is -log(E), with E = -log(1 - u) computed where it is small from all 32 bits of u: a token wins by
          a small E, so those below 1e-7 are drawn as often as they should
Traffic   logits once
Source    the Gumbel-max trick; Philox-4x32-10: Salmon et al. 2011
"""

import torch
from torch import Tensor

from ._triton import Launch, kept_launch, tl, triton, use_triton
from ._tuning import SHAPES


def gumbel_reference(seed: Tensor, rows: Tensor, counts: Tensor, V: int) -> Tensor:
    """Return the noise of all columns, (B, V) fp32."""
    bits = 2**32 - 1
    column = torch.arange(V, device=rows.device).expand(len(rows), V)
    c0, c1, c2 = column, counts.long()[:, None].expand_as(column), rows.long()[:, None].expand_as(column)
    c3 = torch.zeros_like(column)
    k0, k1 = seed & bits, (seed >> 32) & bits

    def high_and_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:  # of a 64-bit product, in signed integers
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & bits

    for _ in range(10):
        (high_2, low_2), (high_0, low_0) = high_and_low(0xCD9E8D57, c2), high_and_low(0xD2511F53, c0)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & bits, (k1 + 0xBB67AE85) & bits
    u = (c0.float() + 0.5) * 2**-32
    near_zero = u * (1 + u * (0.5 + u / 3))
    return -torch.where(u < 2**-8, near_zero, -torch.log(1 - u)).log()


def draw_tokens_reference(
    logits: Tensor, seed: Tensor, rows: Tensor, counts: Tensor, *, temperature: float, banned: Tensor | None = None
) -> Tensor:
    """Compute `draw_tokens` in plain torch."""
    scores = logits.float()
    if temperature:
        scores = scores * (1 / temperature) + gumbel_reference(seed, rows, counts, logits.shape[1])
    if banned is not None:
        scores = scores.masked_fill(banned, float("-inf"))
    return scores.argmax(1)


@triton.jit
def _kernel(
    logits_ptr, banned_ptr, seed_ptr, rows_ptr, counts_ptr, best_ptr, token_ptr, stride, V, scale, TILE: tl.constexpr,
    BLOCK: tl.constexpr, DRAW: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    best, token = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, TILE, BLOCK):
        column = tile * TILE + start + lane
        inside = column < V
        x = tl.load(logits_ptr + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        if DRAW:
            zero = tl.zeros_like(column)
            bits, _, _, _ = tl.philox(
                tl.load(seed_ptr), column, tl.load(counts_ptr + row) + zero, tl.load(rows_ptr + row) + zero, zero
            )
            u = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
            near_zero = u * (1 + u * (0.5 + u / 3))
            x = x * scale - tl.log(tl.where(u < 0.00390625, near_zero, -tl.log(1 - u)))
        if BANNED:
            x = tl.where(tl.load(banned_ptr + column, mask=inside, other=1) != 0, float("-inf"), x)
        better = x > best  # of equal ones the first, as argmax
        best, token = tl.where(better, x, best), tl.where(better, column, token)
    top = tl.max(best, 0)
    tiles = tl.num_programs(1)
    tl.store(best_ptr + row * tiles + tile, top)
    token = tl.min(tl.where(best == top, token, 2147483647), 0)
    tl.store(token_ptr + row * tiles + tile, tl.minimum(token, V - 1))  # of a row of NaN too, a token that exists


@triton.jit
def _best_kernel(best_ptr, tile_token_ptr, token_ptr, TILES: tl.constexpr):
    row = tl.program_id(0)
    at = row * TILES + tl.arange(0, TILES)
    best = tl.load(best_ptr + at)
    token = tl.where(best == tl.max(best, 0), tl.load(tile_token_ptr + at), 2147483647)
    tl.store(token_ptr + row, tl.min(token, 0).to(tl.int64))


def draw_tokens(
    logits: Tensor, seed: Tensor, rows: Tensor, counts: Tensor, *, temperature: float, banned: Tensor | None = None
) -> Tensor:
    """Draw a token for each row.

    Args:
        logits: (B, V), fp32, fp16 or bf16, V below 2^31; at least one column that is not banned and above -inf. Of a
            row of NaN, some token is drawn.
        seed: (1,) int64, on the device: a CUDA graph reads it when it is replayed.
        rows: (B,) int32, a number for each row that no other row has, such as its place among all prompts.
        counts: (B,) int32, the tokens that were drawn for a row before. Draws of two rows, or of two counts, are
            independent.
        temperature: what logits are divided by; 0: the likeliest, of equal ones the first.
        banned: (V,) bool, columns that are not drawn.

    Returns:
        (B,) int64, on the device.
    """
    B, V = logits.shape
    if not use_triton(logits):
        return draw_tokens_reference(logits, seed, rows, counts, temperature=temperature, banned=banned)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tiles, block, warps = SHAPES.DRAW_TOKENS
    tile = triton.cdiv(triton.cdiv(V, tiles), block) * block
    best, of_tile = logits.new_empty(B, tiles, dtype=torch.float32), rows.new_empty(B, tiles)
    token = seed.new_empty(B)
    launch: Launch = kept_launch(
        _kernel, (B, tiles), logits.stride(0), V, 1 / temperature if temperature else 1.0, TILE=tile, BLOCK=block,
        DRAW=temperature > 0, BANNED=banned is not None, num_warps=warps,
    )  # fmt: skip
    launch(logits, banned, seed, rows, counts, best, of_tile)
    launch = kept_launch(_best_kernel, (B,), TILES=tiles, num_warps=1)
    launch(best, of_tile, token)
    return token


def note_tokens_reference(
    tokens: Tensor, drawn: Tensor, slots: Tensor, latest: Tensor, counts: Tensor, lengths: Tensor, done: Tensor,
    ends: Tensor, most: Tensor,
) -> None:  # fmt: skip
    """Compute `note_tokens` in plain torch."""
    active, limit = ~done, drawn.shape[1] - 1
    drawn[slots.long(), torch.where(active, counts, limit).long()] = tokens
    latest.copy_(torch.where(active, tokens, latest))
    counts += active
    lengths += active
    done |= (tokens[:, None] == ends).any(1) | (counts >= most)


@triton.jit
def _note_kernel(
    token_ptr, drawn_ptr, slots_ptr, latest_ptr, counts_ptr, lengths_ptr, done_ptr, ends_ptr, most_ptr,
    B, limit, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < B
    done = tl.load(done_ptr + row, mask=live, other=1) != 0
    token, count = tl.load(token_ptr + row, mask=live, other=0), tl.load(counts_ptr + row, mask=live, other=0)
    active = live & (done == 0)
    # a row that is done writes behind the end
    at = tl.load(slots_ptr + row, mask=live, other=0).to(tl.int64) * (limit + 1) + tl.where(active, count, limit)
    tl.store(drawn_ptr + at, token, mask=live)
    tl.store(latest_ptr + row, token, mask=active)
    tl.store(counts_ptr + row, count + 1, mask=active)
    tl.store(lengths_ptr + row, tl.load(lengths_ptr + row, mask=active, other=0) + 1, mask=active)
    done = done | (tl.where(active, count + 1, count) >= tl.load(most_ptr))
    for end in range(ENDS):
        done = done | (token == tl.load(ends_ptr + end))
    tl.store(done_ptr + row, done.to(tl.int8), mask=live)


def note_tokens(
    tokens: Tensor, drawn: Tensor, slots: Tensor, latest: Tensor, counts: Tensor, lengths: Tensor, done: Tensor,
    ends: Tensor, most: Tensor,
) -> None:  # fmt: skip
    """Write drawn tokens down, in place, for all rows that are not done.

    Args:
        tokens: (B,) int64, what was drawn.
        drawn: (slots, limit + 1) int64: what each slot's row has drawn; the last column is for rows that are done.
        slots: (B,) int32, of each row. Rows that are done may share one.
        latest: (B,) int64, what each row reads next.
        counts, lengths: (B,) int32, how many tokens were drawn for it, and how many it has in all but the latest.
        done: (B,) bool. Set where the token is an end, or a row has its most tokens.
        ends: (E,) int64.
        most: (1,) int32, on the device, at most `limit`: the tokens of a row.
    """
    if not use_triton(latest):
        return note_tokens_reference(tokens, drawn, slots, latest, counts, lengths, done, ends, most)
    B, block = len(tokens), 64
    launch: Launch = kept_launch(
        _note_kernel, (triton.cdiv(B, block),), B, drawn.shape[1] - 1, ENDS=len(ends), BLOCK=block, num_warps=2
    )
    launch(tokens, drawn, slots, latest, counts, lengths, done.view(torch.int8), ends, most)
    return None
