"""adamw_ and gradient_norm against fp64 and torch's own, over lists of odd tensors."""

import pytest
import torch
from kernel_checks import assert_within_plain_error, normal

from liger_trainer.kernels._triton import Launch
from liger_trainer.kernels.adamw import adamw_, adamw_reference
from liger_trainer.kernels.gradient_norm import gradient_norm

SHAPES = [(3, 5), (16,), (33,), (), (7, 20), (0, 3), (64,)]
OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}
STEPS = 3


class State:
    """Parameters with their moments, updated by our op, or by its reference."""

    def __init__(self, params):
        self.params = list(params)
        self.means, self.squares = ([torch.zeros_like(p) for p in self.params] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in self.params]

    def step(self, update, grads, **options):
        torch._foreach_add_(self.steps, 1)
        update(self.params, grads, self.means, self.squares, self.steps, **OPTIONS, **options)

    def named(self) -> dict[str, torch.Tensor]:
        lists = {"param": self.params, "exp_avg": self.means, "exp_avg_sq": self.squares}
        return {f"{name}{i}": x.clone() for name, tensors in lists.items() for i, x in enumerate(tensors)}

    def double(self) -> "State":
        return State(p.double() for p in self.params)


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


def test_planted_errors_are_seen(fp32, monkeypatch):
    """A coefficient, rate or weight that is off by 1 % is farther from the truth than the checks above allow."""
    start = [normal(*shape, seed=i, like=fp32) for i, shape in enumerate(SHAPES)]
    for name, wrong in {"lr": 3e-2 * 1.01, "betas": (0.9 * 1.01, 0.99), "eps": 0.1, "weight_decay": 0.303}.items():
        ours, truth = State(p.clone() for p in start), State(start).double()
        grads = gradients(fp32, 0)
        truth.step(adamw_reference, [g.double() for g in grads])
        monkeypatch.setitem(OPTIONS, name, wrong)
        ours.step(adamw_, grads)
        monkeypatch.undo()
        with pytest.raises(AssertionError):
            plain = State(start)
            plain.step(adamw_reference, grads)
            for key, got in ours.named().items():
                assert_within_plain_error(key, got, plain.named()[key], truth.named()[key], fp32.dtype)


def test_found_inf_keeps_everything(fp32):
    state = State(gradients(fp32, 5))
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


@pytest.mark.gpu
def test_more_than_2_31_numbers():
    n = 2**31 + 4099
    param, grad = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in "pg")
    grad[-3:] = 1.0
    grad[2**31 - 1] = 2.0
    state = State([param])
    state.step(adamw_, [grad])
    moved = param.nonzero().flatten().tolist()
    assert moved == [2**31 - 1, n - 3, n - 2, n - 1]
    assert param[moved].tolist() == pytest.approx([-OPTIONS["lr"]] * 4, rel=1e-2)
    assert gradient_norm([grad]).item() == pytest.approx(7**0.5)
