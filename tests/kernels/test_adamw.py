"""adamw_ and gradient_norm against fp64 and torch's own, over lists of odd tensors; moments in 8 bits, and bf16 weights
rounded by chance."""

import functools

import pytest
import torch
from kernel_checks import PATHS, Place, assert_within_plain_error, normal, set_path

from liger_trainer.kernels import adamw as ops
from liger_trainer.kernels._triton import Launch
from liger_trainer.kernels.adamw import ByChance, adamw_, adamw_reference
from liger_trainer.kernels.eight_bits import blocks_of, decoded_reference, encoded_reference, maps_on
from liger_trainer.kernels.gradient_norm import gradient_norm

SIZES = (1, 255, 257, 4095, 0, 1700)  # of moments in 8 bits
SHAPES = [(3, 5), (16,), (33,), (), (7, 20), (0, 3), (64,)]
OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}
STEPS = 3


class State:
    """Parameters with their moments, in fp32 or in 8 bits, updated by our op or by its reference."""

    def __init__(self, params, eight_bits: bool = False):
        self.params = list(params)
        kind = {"dtype": torch.uint8} if eight_bits else {}
        self.means, self.squares = ([torch.zeros_like(p, **kind) for p in self.params] for _ in range(2))
        device = self.params[0].device
        self.steps = [torch.zeros((), device=device) for _ in self.params]
        largest = ([torch.zeros(-(-p.numel() // 256), device=device) for p in self.params] for _ in "mv")
        self.largest = tuple(largest) if eight_bits else None

    def step(self, update, grads, **options):
        torch._foreach_add_(self.steps, 1)
        lists = self.params, grads, self.means, self.squares, self.steps
        update(*lists, largest=self.largest, **{**OPTIONS, **options})

    def named(self) -> dict[str, torch.Tensor]:
        lists = {"param": self.params, "exp_avg": self.means, "exp_avg_sq": self.squares}
        lists |= {f"largest {i} of ": each for i, each in enumerate(self.largest or ())}
        return {f"{name}{i}": x.clone() for name, tensors in lists.items() for i, x in enumerate(tensors)}

    def double(self) -> "State":
        return State(p.double() for p in self.params)

    def copy(self, dtype: torch.dtype | None = None) -> "State":
        """Of moments in 8 bits."""
        new = packed(p.to(dtype or p.dtype, copy=True) for p in self.params)
        for name in ("means", "squares", "steps"):
            setattr(new, name, [x.clone() for x in getattr(self, name)])
        new.largest = tuple([x.clone() for x in each] for each in self.largest)
        return new

    def moments(self) -> dict[str, torch.Tensor]:
        pairs = ((self.means, self.largest[0], True), (self.squares, self.largest[1], False))
        return {
            f"{'mean' if signed else 'square'}{i}": decoded_reference(x, most, signed)
            for codes, largest, signed in pairs for i, (x, most) in enumerate(zip(codes, largest, strict=True))
        }  # fmt: skip


packed = functools.partial(State, eight_bits=True)


def gradients(place, step: int) -> list[torch.Tensor]:
    return [normal(*shape, seed=100 * step + i, like=place) for i, shape in enumerate(SHAPES)]


def torch_steps(params, place, coefficient: float) -> dict[str, torch.Tensor]:
    """What torch's fused AdamW makes of the same steps."""
    leaves = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(leaves, fused=True, **OPTIONS)
    for step in range(STEPS):
        for leaf, grad in zip(leaves, gradients(place, step), strict=True):
            leaf.grad = grad * coefficient
        optimizer.step()
    moments = {
        f"{name}{i}": optimizer.state[x][name] for i, x in enumerate(leaves) for name in ("exp_avg", "exp_avg_sq")
    }
    return {f"param{i}": x.detach() for i, x in enumerate(leaves)} | moments


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_against_fp64_and_torch(place, coefficient):
    start = [normal(*shape, seed=i, like=place) for i, shape in enumerate(SHAPES)]
    ours, truth = State(p.clone() for p in start), State(start).double()
    scale = None if coefficient == 1.0 else torch.tensor(coefficient, device=place.device)
    for step in range(STEPS):
        grads = gradients(place, step)
        ours.step(adamw_, grads, coefficient=scale)
        truth.step(adamw_reference, [g.double() for g in grads], coefficient=scale)
    plain = torch_steps(start, place, coefficient)
    for name, got in ours.named().items():
        assert_within_plain_error(name, got, plain[name], truth.named()[name], place.dtype)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_found_inf_keeps_everything(fp32, eight_bits):
    state = State(gradients(fp32, 5), eight_bits)
    state.step(adamw_, gradients(fp32, 0))
    before = state.named()
    broken = [g * torch.nan for g in gradients(fp32, 1)]
    state.step(adamw_, broken, found_inf=torch.ones((), device=fp32.device))
    assert all(torch.equal(x, before[name]) for name, x in state.named().items())
    state.step(adamw_, gradients(fp32, 1), found_inf=torch.zeros((), device=fp32.device))
    assert not torch.equal(state.params[0], before["param0"])


def test_each_parameter_has_its_own_step(fp32):
    """As of experts that had no gradient in some steps: steps of 4 and of 2, taken at once, are those of each."""
    start, grad = normal(20, seed=1, like=fp32), normal(20, seed=2, like=fp32)

    def after(steps: int) -> State:
        state = State([start.clone()])
        for _ in range(steps):
            state.step(adamw_, [grad])
        return state

    late, early = after(3), after(1)
    lists = [[*getattr(late, name), *getattr(early, name)] for name in ("params", "means", "squares", "steps")]
    torch._foreach_add_(lists[3], 1)
    adamw_(lists[0], [grad] * 2, *lists[1:], **OPTIONS)
    torch.testing.assert_close(lists[0], [*after(4).params, *after(2).params], rtol=1e-6, atol=1e-7)


def in_memory(x: torch.Tensor, form: str) -> torch.Tensor:
    if form == "transposed":
        return x.t().contiguous().t()
    wide = x.new_empty(x.shape[0], 2 * x.shape[1] + 1)
    view = wide[:, 1 : 2 * x.shape[1] : 2] if form == "gaps" else wide.flatten()[1 : 1 + x.numel()].view(x.shape)
    return view.copy_(x)


@pytest.mark.parametrize("param", ["plain", "transposed", "gaps", "unaligned"])
@pytest.mark.parametrize("grad", ["plain", "transposed", "gaps", "unaligned"])
def test_any_order_in_memory(fp32, param, grad):
    x, g = normal(6, 7, seed=0, like=fp32), normal(6, 7, seed=1, like=fp32)
    expected = State([x.clone()])
    expected.step(adamw_reference, [g])
    state = State([x.clone() if param == "plain" else in_memory(x, param)])
    state.step(adamw_, [g if grad == "plain" else in_memory(g, grad)])
    torch.testing.assert_close(state.params[0], expected.params[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient_norm([in_memory(g, "gaps"), x]), torch.cat([g, x]).norm())


def test_several_dtypes_and_none(fp32):
    adamw_([], [], [], [], [], **OPTIONS)
    start = [normal(9, seed=0, like=fp32), normal(9, seed=1, like=fp32).half()]
    state, expected = State(p.clone() for p in start), State(p.clone() for p in start)
    grads = [torch.ones_like(p) for p in start]
    state.step(adamw_, grads)
    expected.step(adamw_reference, grads)
    for got, right in zip(state.params, expected.params, strict=True):
        torch.testing.assert_close(got, right)
    assert gradient_norm(grads).item() == pytest.approx(18**0.5)


def test_autograd_knows_of_the_update(fp32):
    weight = normal(8, 8, seed=0, like=fp32).requires_grad_()
    kept = (weight * weight).sum()
    with torch.no_grad():
        state = State([weight])
        state.step(adamw_, [torch.ones_like(weight)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_norm_against_fp64(place):
    grads = gradients(place, 1)
    truth = torch.cat([g.double().flatten() for g in grads]).norm()
    norm = gradient_norm(grads)
    assert norm.shape == () and norm.item() == pytest.approx(truth.item(), rel=1e-6)
    assert torch.equal(norm, gradient_norm(grads))
    broken = [*grads, torch.full((3,), torch.inf, device=place.device, dtype=place.dtype)]
    assert not gradient_norm(broken).isfinite()
    with pytest.raises(ValueError, match="at least one"):
        gradient_norm([])


def test_torch_takes_over_where_triton_cannot_compile(fp32, monkeypatch):
    start = [normal(*shape, seed=i, like=fp32) for i, shape in enumerate(SHAPES)]
    ours, plain = State(p.clone() for p in start), State(start)
    grads = gradients(fp32, 0)
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors, has_twin=False: not has_twin)
    ours.step(adamw_, grads)
    plain.step(adamw_reference, grads)
    assert all(torch.equal(x, plain.named()[name]) for name, x in ours.named().items())
    want = torch.cat([g.flatten() for g in grads]).norm()
    torch.testing.assert_close(gradient_norm(grads), want)


# Moments in 8 bits


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> Place:
    """The interpreter takes bf16 here too: it cuts digits off, and what was rounded by chance has no more of them."""
    device = set_path(monkeypatch, request.param)
    monkeypatch.setattr(ops, "CHUNK", 512)
    monkeypatch.setattr(ops, "CHUNK_8BIT", 512)
    return Place(request.param, device, torch.float32)


def spread(n: int, seed: int, place: Place, decades: float = 1.0) -> torch.Tensor:
    """Numbers of both signs over several decades."""
    return normal(n, seed=seed, like=place) * 10 ** (decades * normal(n, seed=seed + 1000, like=place))


def test_maps():
    """As the paper has them; computed with torch in fp64 here, in fp32 there."""
    for signed, values in zip((True, False), maps_on(torch.device("cpu")), strict=True):
        n = 1 if signed else 2
        positive = [10 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / (n << i)) for i in range(7) for k in range(n << i)]
        expected = torch.tensor(sorted([0.0, 1.0, *positive, *(-x for x in positive if signed)]))
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("floor", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_codes_are_the_nearest(path, n, floor):
    """With betas of 0 the moments are g and g^2. Edges between two values are among the numbers, in blocks that have
    1.0 as the largest."""
    maps = maps_on(torch.device(path.device))
    g = spread(n, 0, path, 2.0)
    middles = [(values[1:] + values[:-1]) / 2 for values in maps]
    edges = torch.cat([middles[0], middles[1].sqrt()])
    near = torch.cat([edges * 1.0001, edges * 0.9999, maps[0]])[: max(n - 257, 0)]
    g[len(g) - len(near) :] = near
    g[256::256] = 1.0
    g[1:4:2] = 0.0
    state = packed([torch.zeros_like(g)])
    state.step(adamw_, [g], betas=(0.0, 0.0), floor=floor)
    for i, (x, codes) in enumerate(((g, state.means[0]), (g * g, state.squares[0]))):
        values, largest = maps[i], state.largest[i]
        assert torch.equal(largest[0], blocks_of(x).abs().amax(1))
        scaled = (blocks_of(x).double() / largest[0].double()[:, None]).nan_to_num().flatten()[:n]
        distances = (values.double() - scaled[:, None]).abs()
        if floor and i == 1:
            distances[scaled > 0, 0] = torch.inf
        got = distances.gather(1, codes.long()[:, None])[:, 0]
        assert bool((got <= distances.amin(1) + 1e-6 * scaled.abs()).all())


@pytest.mark.parametrize("coefficient", [None, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_8_bits_against_fp64(path, dtype, coefficient):
    """Each step from the same codes: the weights, and the moments that are stored, within their own rounding."""
    place = path._replace(dtype=dtype)
    ours = packed(normal(n, seed=n, like=place) for n in SIZES)
    scale = None if coefficient is None else torch.tensor(coefficient, device=path.device)
    for step in range(3):
        grads = [spread(n, 10 * step + n, path).to(dtype) for n in SIZES]
        plain, truth = ours.copy(), ours.copy(torch.float64)
        ours.step(adamw_, grads, coefficient=scale)
        plain.step(adamw_reference, grads, coefficient=scale)
        truth.step(adamw_reference, [g.double() for g in grads], coefficient=scale)
        for i, p in enumerate(ours.params):
            assert_within_plain_error(f"param{i}", p, plain.params[i], truth.params[i], dtype)
        for name, x in ours.moments().items():
            expected = truth.moments()[name]
            apart = (x - expected).abs() > 1e-5 * expected.abs()
            assert apart.float().mean() < 2e-3 if apart.numel() else True, name  # the edges between two codes
            torch.testing.assert_close(x, expected, rtol=0.7, atol=1e-6 * expected.abs().max().item() if len(x) else 0)


def test_a_small_square_is_never_0(path):
    """Where gradients of the block are 10^5 times as large, it would be, and mean / eps huge."""
    g = torch.full((256,), 1e-5, device=path.device)
    g[0] = 1.0
    moved = {}
    for floor in (True, False):
        state = packed([torch.zeros_like(g)])
        for grad in (g, 0 * g):
            state.step(adamw_, [grad], weight_decay=0.0, eps=1e-10, floor=floor)
        assert bool((state.squares[0] > 0).all()) is floor
        moved[floor] = state.params[0].abs().max().item() / OPTIONS["lr"]
    assert moved[True] < 3 and moved[False] > 1000


def test_zeros_huge_numbers_and_nan(path):
    grads = [torch.zeros(512, device=path.device) for _ in range(4)]
    grads[1][3], grads[2][300], grads[3][7] = 1e18, torch.nan, 1e-25  # the last one's square is no normal number
    state = packed([torch.ones_like(g) for g in grads])
    state.step(adamw_, grads, weight_decay=0.0)
    finite = [p.isfinite() for p in state.params]
    assert torch.equal(state.params[0], torch.ones_like(grads[0])) and finite[1].all() and finite[3].all()
    assert state.params[1][3].item() == pytest.approx(1 - OPTIONS["lr"])
    assert finite[2].sum() == 511 and not finite[2][300]
    for largest in state.largest:
        assert [x.isfinite().tolist() for x in largest] == [[True, True], [True, True], [True, False], [True, True]]
    state.step(adamw_, [torch.zeros_like(g) for g in grads], weight_decay=0.0)
    assert not state.params[2][256:].isfinite().any()  # and so the weights of its block are known to be lost


# Rounding by chance


def drawn(path: Place, start: torch.Tensor, update: float, rounding: ByChance, **options) -> torch.Tensor:
    """bf16 weights after a step that subtracts `update` of them, in fp32 moments."""
    state = State([start.to(torch.bfloat16)])
    state.step(
        adamw_, [torch.ones_like(state.params[0])], eps=0.0, weight_decay=0.0, lr=update, rounding=rounding, **options
    )
    return state.params[0].float()


@pytest.mark.parametrize("share", [0.0, 0.004, 0.3, 0.99])
@pytest.mark.parametrize("sign", [1, -1])
def test_by_chance_means_are_right_and_only_neighbours_come(path, share, sign, monkeypatch):
    monkeypatch.setattr(ops, "CHUNK", 2**14)  # soon done in the interpreter
    n, unit = 2**16, 2**-7
    start = torch.full((n,), 1.5 * sign, device=path.device)
    got = drawn(path, start, -share * unit, ByChance(3, [0]))
    assert set(got.tolist()) <= {1.5 * sign, 1.5 * sign + unit}
    wrong = got.double().mean().item() - (1.5 * sign + share * unit)
    assert abs(wrong) <= 4 * unit * (share * (1 - share) / n) ** 0.5 + 1e-4 * unit


def bits_of(path: Place, n: int = 3000, **options) -> torch.Tensor:
    return drawn(path, torch.ones(n, device=path.device), -0.5 * 2**-7, **options) != 1


def test_chances_are_those_of_place_number_step_and_seed(path, monkeypatch):
    rounding = ByChance(2**40 + 5, [7])
    first = bits_of(path, rounding=rounding)
    assert 0.4 < first.double().mean() < 0.6
    monkeypatch.setattr(ops, "CHUNK", 2048)
    monkeypatch.setattr(ops, "CHUNK_8BIT", 1024)
    assert torch.equal(bits_of(path, rounding=rounding), first)
    assert torch.equal(bits_of(path, 1000, rounding=rounding), first[:1000])
    for other in (ByChance(5, [7]), ByChance(2**40 + 5, [8])):
        assert 0.4 < (bits_of(path, rounding=other) == first).double().mean() < 0.6
    state = State([torch.ones(3000, dtype=torch.bfloat16, device=path.device)])
    state.steps[0].fill_(1)
    options = {"eps": 0.0, "betas": (0.0, 0.0), "lr": -0.5 * 2**-7, "weight_decay": 0.0}
    state.step(adamw_, [torch.ones_like(state.params[0])], rounding=rounding, **options)
    assert 0.4 < ((state.params[0] != 1) == first).double().mean() < 0.6  # t is 2
    # the same in a list in another order, with moments in 8 bits or not; as in torch
    for eight_bits in (True, False):
        for order in ([7, 2], [2, 7]):
            both = State([torch.ones(3000, dtype=torch.bfloat16, device=path.device) for _ in order], eight_bits)
            for update in (adamw_, adamw_reference):
                both.steps, both.params = [x * 0 for x in both.steps], [torch.ones_like(p) for p in both.params]
                grads = [torch.ones_like(p) for p in both.params]
                both.step(update, grads, rounding=ByChance(2**40 + 5, order), **options)
                assert torch.equal(both.params[order.index(7)] != 1, first)


def test_by_chance_nan_stays_and_fp32_is_exact(path):
    start = torch.ones(600, device=path.device)
    start[5], start[6] = torch.nan, torch.inf
    got = drawn(path, start, 0.01, ByChance(1, [0]))
    assert got.isnan().nonzero().flatten().tolist() == [5] and got[6] == torch.inf
    plain, chance = (packed([torch.ones(600, device=path.device)]) for _ in range(2))
    plain.step(adamw_, [start.nan_to_num(0, 0)])
    chance.step(adamw_, [start.nan_to_num(0, 0)], rounding=ByChance(1, [0]))
    assert torch.equal(plain.params[0], chance.params[0])


def test_beside_bitsandbytes():
    """Its maps and largest magnitudes, and codes never nearer than ours: on a CPU it finds them by a coarse table."""
    functional = pytest.importorskip("bitsandbytes.functional")
    cpu = Place("torch", "cpu", torch.float32)
    for signed, values in zip((True, False), maps_on(torch.device("cpu")), strict=True):
        assert torch.equal(values, functional.create_dynamic_map(signed=signed))
        x = spread(4095, 1, cpu) if signed else spread(4095, 1, cpu) ** 2
        codes, state = functional.quantize_blockwise(x, code=values, blocksize=256)
        ours, largest = encoded_reference(x, signed, floor=False)
        assert torch.equal(largest, state.absmax)
        scaled = (blocks_of(x) / largest[:, None]).flatten()[:4095]
        errors = [(values[each.long()] - scaled).abs() for each in (ours, codes)]
        assert bool((errors[0] <= errors[1] + 1e-7).all()) and errors[1].max() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", [None, ByChance(1, [0])])
def test_more_than_2_31_numbers(rounding):
    n = 2**31 + 4099
    param, grad = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in "pg")
    grad[-3:] = 1.0
    grad[2**31 - 1] = 2.0
    state = State([param])
    state.step(adamw_, [grad], rounding=rounding)
    moved = param.nonzero().flatten().tolist()
    assert moved == [2**31 - 1, n - 3, n - 2, n - 1]
    assert param[moved].tolist() == pytest.approx([-OPTIONS["lr"]] * 4, rel=1e-2)
    assert gradient_norm([grad]).item() == pytest.approx(7**0.5)
