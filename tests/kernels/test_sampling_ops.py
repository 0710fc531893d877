"""Attention of one new token a row, and drawing tokens, against plain torch; what they draw, against probabilities."""

import pytest
import torch

from liger_trainer.kernels._triton import INSTALLED, INTERPRETED
from liger_trainer.kernels.decode_attention import (
    QKNorm,
    Rotation,
    decode_attention,
    decode_attention_reference,
    places_of,
)
from liger_trainer.kernels.draw_tokens import (
    draw_tokens,
    draw_tokens_reference,
    gumbel_reference,
    note_tokens,
    note_tokens_reference,
)
from liger_trainer.kernels.thin_linear import MOST_TILES, ROWS, thin_linear, thin_linear_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
launched = pytest.mark.skipif(not (INSTALLED and (INTERPRETED or DEVICE == "cuda")), reason="the kernels do not run")
LENGTHS = [0, 1, 63, 64, 65, 127, 30]


def attention_inputs(group, D, dtype, longest=130, heads=2):
    B = len(LENGTHS)
    like = {"dtype": dtype, "device": DEVICE}
    q = torch.randn(B, 3, heads * group, D, **like)[:, 1]  # a view with gaps
    k, v = (torch.randn(B, heads, 2, D, **like)[:, :, 1] for _ in "kv")
    keys, values = (torch.randn(B + 2, heads, longest, D, **like) for _ in "kv")
    slots = torch.randperm(B + 2, device=DEVICE)[:B].int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    for kept in (keys, values):  # what is behind a row's last key is not read
        for slot, length in zip(slots.tolist(), LENGTHS, strict=True):
            kept[slot, :, length:] = float("nan")
    return q, k, v, keys, values, slots, lengths


ATTENTION = [  # queries of a key head, columns, options; columns that are rotated, and how the norms compute
    (1, 16, {}, None, None),
    (2, 64, {"window": 40}, None, None),
    (8, 24, {"softcap": 3.0}, None, None),
    (4, 128, {"window": 64, "softcap": 5.0}, None, None),
    (2, 16, {}, 16, (1.0, False)),
    (3, 64, {}, 64, None),
    (1, 64, {}, 24, (0.0, True)),
    (4, 128, {}, 128, (1.0, False)),
]


@launched
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_over_kept_keys(case, dtype):
    """Of queries and new keys as they are, rotated, or normed and rotated."""
    group, D, options, R, norm = case
    inputs, weights = attention_inputs(group, D, dtype), torch.randn(2, D, dtype=dtype, device=DEVICE)
    angles = torch.randn(len(LENGTHS), (R or 2) // 2, device=DEVICE).repeat(1, 2) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def how(cast):
        norms = None if norm is None else QKNorm(*cast(weights), 1e-3, *norm)
        rotation = {} if R is None else {"rotation": Rotation(cast(cos), cast(sin), norms)}
        return {"scale": 0.3, **options, **rotation}

    wide = [x.double() if x.is_floating_point() else x.clone() for x in inputs]
    truth = decode_attention_reference(*wide, **how(torch.Tensor.double))
    plain = [x.clone() for x in inputs]
    error = (decode_attention_reference(*plain, **how(torch.Tensor.clone)).double() - truth).norm()
    got = decode_attention(*inputs, **how(torch.Tensor.clone))
    assert (got.double() - truth).norm() <= 2 * error + 1e-6 * truth.norm()
    for kept, want, true in zip(inputs[3:5], plain[3:5], wide[3:5], strict=True):  # only the new ones are written
        kept, want, true = (x.double().nan_to_num(7.0) for x in (kept, want, true))
        bound = 0 if R is None else 2 * (want - true).norm() + 1e-6 * true.norm()
        assert (kept - (want if R is None else true)).norm() <= bound


@launched
def test_keys_are_read_where_places_says():
    q, k, v, keys, values, slots, lengths = attention_inputs(2, 32, torch.float32)
    moved = [torch.cat([x, x[:, :, :5]], 2) for x in (keys, values)]
    places = torch.tensor(places_of(*moved), device=DEVICE)
    want = decode_attention_reference(q, k, v, *(x.clone() for x in moved), slots, lengths, scale=0.2)
    got = decode_attention(q, k, v, keys.zero_(), values, slots, lengths, scale=0.2, places=places)
    torch.testing.assert_close(got, want)


def test_what_does_not_fit_is_refused():
    q, k, v, keys, values, slots, lengths = attention_inputs(2, 32, torch.float32)
    with pytest.raises(ValueError, match="must share B, Hk and D"):
        decode_attention(q, k[:, :1], v[:, :1], keys, values, slots, lengths, scale=1.0)
    wide = torch.zeros(len(LENGTHS), 34, device=DEVICE)
    with pytest.raises(ValueError, match="cos and sin must be"):
        decode_attention(q, k, v, keys, values, slots, lengths, scale=1.0, rotation=Rotation(wide, wide))
    with pytest.raises(ValueError, match="keys have the dtype of q"):
        decode_attention(q, k, v, keys.double(), values.double(), slots, lengths, scale=1.0)


PRODUCTS = [  # columns of each weight, K, biases, what follows: several tiles and less than one, one product shared
    ((40, 16, 24), 72, False, {}),
    ((40, 1, 24), 72, True, {}),
    ((33, 65), 1000, True, {}),
    ((70,), 2056, True, {}),
    ((70,), 2056, False, {"residual": True}),
    ((70,), 40, True, {"residual": True}),
    ((70, 70), 136, False, {"activation": "silu"}),
    ((33, 33), 300, True, {"activation": "gelu_tanh"}),
]


@launched
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32] if DEVICE == "cpu" else [torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("rows", [1, 19, 64, 70])
@pytest.mark.parametrize("sizes, K, biased, how", PRODUCTS, ids=str)
def test_products_of_few_rows(sizes, K, biased, how, rows, dtype):
    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype, device=DEVICE)

    x, weights = draw(rows, 1, K), [draw(size, K) / K**0.5 for size in sizes]
    biases = [draw(size) for size in sizes] if biased else None
    how = {**how, **({"residual": draw(rows, 1, sizes[0])} if "residual" in how else {})}
    wide = {name: value.double() if torch.is_tensor(value) else value for name, value in how.items()}
    truth = thin_linear_reference(
        x.double(), [w.double() for w in weights], biases and [b.double() for b in biases], **wide
    )
    plain = thin_linear_reference(x, weights, biases, **how)
    arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # what the parts count is zero again afterwards
        got = thin_linear(x, weights, biases, **how, arrived=arrived)
        assert [y.dtype for y in got] == [y.dtype for y in plain] and not arrived.any()
        for ours, theirs, true in zip(got, plain, truth, strict=True):
            error = (theirs.double() - true).norm()
            assert (ours.double() - true).norm() <= 2 * error + 1e-6 * true.norm()


@launched
def test_wider_weights_and_residuals_of_products():
    x, weight = torch.randn(9, 600, dtype=torch.float16, device=DEVICE), torch.randn(50, 600, device=DEVICE)
    residual = torch.randn(9, 50, device=DEVICE)
    (got,) = thin_linear(x, [weight], residual=residual)
    want = residual.double() + x.double() @ weight.half().double().t()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    x = x.float()
    (got,) = thin_linear(x, [weight, weight], activation="silu", dtype=torch.bfloat16)
    (want,) = thin_linear_reference(x, [weight, weight], activation="silu", dtype=torch.bfloat16)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02 * want.abs().max().item())


def test_products_that_do_not_fit_are_refused():
    x, w = torch.randn(ROWS + 1, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="one to three weights"):
        thin_linear(x, [w[:, :5]])
    with pytest.raises(ValueError, match="takes a bias"):
        thin_linear(x, [w], [torch.zeros(5)])
    with pytest.raises(ValueError, match="gate and up of one shape"):
        thin_linear(x, [w], activation="silu")
    with pytest.raises(ValueError, match="A residual is added"):
        thin_linear(x, [w], residual=x)


def draw_inputs(B, V, dtype=torch.float32):
    seed = torch.tensor([2**40 + 12345], device=DEVICE)
    rows, counts = (torch.randint(0, 1000, (B,), dtype=torch.int32, device=DEVICE) for _ in "ab")
    return torch.randn(B, V + 3, device=DEVICE, dtype=dtype)[:, :V], seed, rows, counts


@launched
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 12, 1024, 5001])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bans", [False, True])
def test_draws_are_those_of_plain_torch(V, temperature, bans, dtype):
    inputs = draw_inputs(5, V, dtype)
    banned = torch.rand(V, device=DEVICE) < 0.5 if bans else None
    if bans:
        banned[V // 2] = False
    how = {"temperature": temperature, "banned": banned}
    assert torch.equal(draw_tokens(*inputs, **how), draw_tokens_reference(*inputs, **how))


@launched
@pytest.mark.parametrize("ends", [[-1], [3, 9, 4]], ids=str)
def test_tokens_are_noted_where_rows_are_not_done(ends):
    B, limit = 70, 5
    state = {
        "drawn": torch.randint(50, 60, (B + 1, limit + 1)), "slots": torch.randperm(B).int(),
        "latest": torch.randint(20, 30, (B,)), "counts": torch.randint(0, limit, (B,)).int(),
        "lengths": torch.randint(0, 99, (B,)).int(), "done": torch.rand(B) < 0.3, "ends": torch.tensor(ends),
        "most": torch.tensor([3], dtype=torch.int32),
    }  # fmt: skip
    state = {name: x.to(DEVICE) for name, x in state.items()}
    tokens, want = torch.randint(0, 10, (B,), device=DEVICE), {name: x.clone() for name, x in state.items()}
    note_tokens_reference(tokens, **want)
    note_tokens(tokens, **state)
    assert all(torch.equal(state[name], want[name]) for name in state)
    assert state["done"].any() and not state["done"].all()


@launched
def test_a_temperature_that_is_off_by_a_percent_draws_others():
    """Logits that take the noise away, but for one thousandth of a token's score."""
    logits, *places = draw_inputs(3, 40)
    wanted = torch.tensor([7, 39, 0], device=DEVICE)
    logits = -0.7 * gumbel_reference(*places, 40).scatter_add(
        1, wanted[:, None], torch.full((3, 1), -1e-3, device=DEVICE)
    )
    assert torch.equal(draw_tokens(logits, *places, temperature=0.7), wanted)
    assert not (draw_tokens(logits, *places, temperature=0.707) == wanted).any()


@launched
def test_of_equal_logits_the_first_is_the_likeliest():
    logits, *rest = draw_inputs(3, 4000)
    logits = logits.clone().zero_()
    logits[1, [3999, 17, 2000]] = 1.0
    logits[2, 2999:] = 1.0
    assert draw_tokens(logits, *rest, temperature=0.0).tolist() == [0, 17, 2999]


@launched
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("V", [12, 5001])
def test_a_row_of_nan_draws_a_token_that_exists(V, temperature):
    """An embedding would else read behind its weights, after which CUDA is not usable."""
    logits, *rest = draw_inputs(3, V)
    logits[1] = float("nan")
    drawn = draw_tokens(logits, *rest, temperature=temperature)
    want = draw_tokens_reference(logits, *rest, temperature=temperature)
    assert torch.equal(drawn[::2], want[::2]) and 0 <= drawn[1] < V


def test_tokens_are_drawn_by_their_probabilities():
    """A chi-square test of 200,000 draws from 12 tokens, at a fixed seed."""
    N, V = 200_000, 12
    logits = torch.linspace(-7, 2, V, device=DEVICE).expand(N, V)
    seed = torch.tensor([99], device=DEVICE)
    rows = torch.arange(N, dtype=torch.int32, device=DEVICE)
    drawn = draw_tokens_reference(logits, seed, rows, torch.full_like(rows, 3), temperature=1.3)
    want = (logits[0].double() / 1.3).softmax(0) * N
    chi_square = ((drawn.bincount(minlength=V) - want) ** 2 / want).sum()
    assert chi_square < 31.3  # 11 degrees of freedom: exceeded once in 1,000


def test_noise_is_philox_as_published():
    """The first word of Philox-4x32-10 of a zero key and counter (Random123's known answers)."""
    zero = torch.zeros(1, dtype=torch.int32)
    u = (0x6627E8D5 + 0.5) * 2.0**-32
    want = -torch.log(-torch.log1p(torch.tensor(-u, dtype=torch.float64)))
    torch.testing.assert_close(
        gumbel_reference(torch.zeros(1, dtype=torch.int64), zero, zero, 1).double()[0, 0], want, rtol=1e-6, atol=1e-6
    )
