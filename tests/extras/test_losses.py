"""The losses of extras.modules.losses against torch's and their formulas: values, gradients, further outputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_trainer import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDivergence,
    LigerFusedLinearJSD,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)

N, H, V = 12, 8, 31
REDUCTIONS = ("mean", "sum", "none")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(ignore_index: int = -100) -> Tensor:
    y = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
    y[::3] = ignore_index
    return y


def value_and_grads(loss_of, *inputs: Tensor) -> list[Tensor]:
    """The loss, and the gradients of inputs under an upstream gradient that is not 1 and differs between tokens."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    loss = loss_of(*inputs)
    return [loss, *torch.autograd.grad(loss, inputs, 1.5 + random(*loss.shape, seed=7))]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


def torch_cross_entropy(logits: Tensor, target: Tensor, z=0.0, softcap=None, token_scaling=False, **options) -> Tensor:
    """torch's loss with what Liger's adds to it."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    reduction, keep = options.pop("reduction", "mean"), target != options.get("ignore_index", -100)
    ce = F.cross_entropy(x, target, reduction="none", **options)
    z_loss = (z * x.logsumexp(-1).square()).where(keep, 0)
    if token_scaling:
        p = x.softmax(-1).gather(1, target.where(keep, 0)[:, None]).squeeze(1).detach()
        ce, z_loss = ce * p, z_loss * p
    if reduction == "none":
        return ce + z_loss
    if reduction == "sum":
        return (ce + z_loss).sum()
    weight = options.get("weight")
    count = keep.sum() if weight is None else weight[target.where(keep, 0)][keep].sum()
    return ce.sum() / count + z_loss.sum() / keep.sum()  # as Liger-Kernel 0.8.5: the z-loss has no class weight


CE = {  # constructor's arguments, and those of torch_cross_entropy that say the same
    "plain": ({}, {}),
    "ignore-index": (dict(ignore_index=5), dict(ignore_index=5)),
    "smoothing": (dict(label_smoothing=0.1), dict(label_smoothing=0.1)),
    "softcap": (dict(softcap=2.0), dict(softcap=2.0)),
    "z-loss": (dict(lse_square_scale=1e-2), dict(z=1e-2)),
    "all": (
        dict(label_smoothing=0.2, softcap=2.0, lse_square_scale=1e-2),
        dict(label_smoothing=0.2, softcap=2.0, z=1e-2),
    ),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", CE)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_cross_entropy_is_torchs(case, reduction, weighted):
    ours, theirs = CE[case]
    weight = random(V).abs() + 0.1 if weighted else None
    target = labels(ours.get("ignore_index", -100))
    loss = LigerCrossEntropyLoss(weight, reduction=reduction, **ours)
    logits = 3 * random(N, V, seed=1)
    wanted = value_and_grads(
        lambda x: torch_cross_entropy(x, target, reduction=reduction, weight=weight, **theirs), logits
    )
    assert_same(value_and_grads(lambda x: loss(x, target), logits), wanted)
    if case == "plain":
        assert_same(wanted[:1], [F.cross_entropy(logits, target, weight, reduction=reduction)])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_in_place(reduction):
    """The gradient lies where the logits lay, and is the same; what is returned beside the loss is taken before."""
    head, target = nn.Linear(H, V), labels()
    options = dict(reduction=reduction, lse_square_scale=1e-2)
    more = dict(return_z_loss=True, return_predicted_tokens=True)
    x = random(N, H)
    logits = head(x)
    before, memory = logits.detach().clone(), logits.data_ptr()
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    seen = []
    output = LigerCrossEntropyLoss(**options, **more, inplace=True)(logits, target)
    got = torch.autograd.grad(output.loss.sum(), list(head.parameters()))
    expected = LigerCrossEntropyLoss(**options, **more)(head(x), target)
    assert_same(list(got), list(torch.autograd.grad(expected.loss.sum(), list(head.parameters()))))
    assert seen == [memory] and not torch.equal(logits.detach(), before)
    assert_same([output.z_loss], [expected.z_loss])
    assert torch.equal(output.predicted_tokens, expected.predicted_tokens)


@pytest.mark.parametrize("smoothing, softcap, weighted", [(0.0, None, False), (0.1, 2.0, True), (0.1, None, False)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_returns_more(reduction, smoothing, softcap, weighted):
    weight = random(V, seed=4).abs() if weighted else None
    logits, target = 3 * random(N, V), labels()
    best = logits.argmax(-1)
    target[1:6:2] = best[1:6:2]
    keep = target != -100
    output = LigerCrossEntropyLoss(
        weight, reduction=reduction, lse_square_scale=1e-2, label_smoothing=smoothing, softcap=softcap,
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
    )(logits.requires_grad_(), target)  # fmt: skip
    options = dict(label_smoothing=smoothing, softcap=softcap, reduction=reduction, weight=weight)
    whole = torch_cross_entropy(logits, target, z=1e-2, **options)
    plain = torch_cross_entropy(logits, target, **options)
    right = ((best == target) & keep).float()
    assert_same([output.loss], [whole])
    torch.testing.assert_close(output.z_loss, (whole - plain).detach(), rtol=1e-4, atol=1e-5)
    assert_same([output.token_accuracy], [right if reduction == "none" else right.sum() / keep.sum()])
    assert torch.equal(output.predicted_tokens, best.where(keep, -1))
    assert not output.z_loss.requires_grad


def test_only_what_is_asked_for_is_returned():
    logits, target = random(N, V), labels()
    assert isinstance(LigerCrossEntropyLoss()(logits, target), Tensor)
    for name in ("z_loss", "token_accuracy", "predicted_tokens"):
        output = LigerCrossEntropyLoss(**{f"return_{name}": True})(logits, target)
        assert isinstance(output, CrossEntropyOutput)
        given = {n for n in ("z_loss", "token_accuracy", "predicted_tokens") if getattr(output, n) is not None}
        assert given == {name}
    weight = nn.Parameter(random(V, H))
    assert isinstance(LigerFusedLinearCrossEntropyLoss()(weight, random(N, H), target), Tensor)
    for name in ("z_loss", "token_accuracy"):
        output = LigerFusedLinearCrossEntropyLoss(**{f"return_{name}": True})(weight, random(N, H), target)
        assert {n for n in ("z_loss", "token_accuracy") if getattr(output, n) is not None} == {name}


def test_class_weights_move_with_the_module_and_stay_out_of_its_state():
    for loss in (LigerCrossEntropyLoss(torch.ones(V)), LigerFusedLinearCrossEntropyLoss(torch.ones(V))):
        (weight,) = loss.to(torch.float64).buffers()
        assert weight.dtype == torch.float64 and not loss.state_dict()


def fused(loss: nn.Module, target: Tensor):
    return lambda weight, x, bias: loss(weight, x, target, bias)


def unfused(target: Tensor, **options):
    return lambda weight, x, bias: torch_cross_entropy(F.linear(x, weight, bias), target, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", [*CE, "token-scaling", "class-weight", "class-weight-scaling"])
def test_fused_linear_cross_entropy_is_torchs(case, reduction):
    weight, bias, x = random(V, H), random(V, seed=1), random(N, H, seed=2)
    classes = random(V, seed=5).abs() + 0.1
    ours, theirs = {
        "token-scaling": (dict(use_token_scaling=True, lse_square_scale=1e-2), dict(token_scaling=True, z=1e-2)),
        "class-weight": (dict(ce_weight=classes), dict(weight=classes)),
        "class-weight-scaling": (
            dict(ce_weight=classes, use_token_scaling=True),
            dict(weight=classes, token_scaling=True),
        ),
        **CE,
    }[case]
    target = labels(ours.get("ignore_index", -100))
    loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction, **ours)
    got = value_and_grads(fused(loss, target), weight, x, bias)
    assert_same(got, value_and_grads(unfused(target, reduction=reduction, **theirs), weight, x, bias))


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fused_linear_cross_entropy_returns_more(reduction, scaling):
    weight, x, target = random(V, H), random(N, H, seed=2), labels()
    best = F.linear(x, weight).argmax(-1)
    target[1:6:2] = best[1:6:2]
    keep = target != -100
    loss = LigerFusedLinearCrossEntropyLoss(
        reduction=reduction, lse_square_scale=1e-2, return_z_loss=True, return_token_accuracy=True,
        use_token_scaling=scaling,
    )  # fmt: skip
    output = loss(weight.requires_grad_(), x, target)
    logits, options = F.linear(x, weight), dict(reduction=reduction, token_scaling=scaling)
    whole = torch_cross_entropy(logits, target, z=1e-2, **options)
    right = ((best == target) & keep).float()
    assert_same([output.loss], [whole])
    z_loss = (whole - torch_cross_entropy(logits, target, **options)).detach()
    torch.testing.assert_close(output.z_loss, z_loss, rtol=1e-4, atol=1e-5)
    assert_same([output.token_accuracy], [right if reduction == "none" else right.sum() / keep.sum()])
    assert not output.z_loss.requires_grad


def test_fused_linear_cross_entropy_sums_in_fp32(monkeypatch):
    """Over several chunks of bf16, the head's gradient errs less with accum_dtype."""
    from liger_trainer.kernels import _linear_loss

    monkeypatch.setattr(_linear_loss, "WORKSPACE_MB", 16 * V / 2**20)  # chunks of 8 rows
    monkeypatch.setattr(_linear_loss, "ROUNDINGS", 64)  # of which so many are summed in fp32 by default
    weight, x = random(V, H).bfloat16(), random(512, H, seed=1).bfloat16()
    target = torch.arange(512) % V
    truth = value_and_grads(lambda w: F.cross_entropy(F.linear(x.double(), w), target), weight.double())[1]
    errors = {}
    for dtype in (None, torch.float32):
        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype)
        grad = value_and_grads(lambda w, loss=loss: loss(w, x, target), weight)[1]
        errors[dtype] = (grad.double() - truth).norm()
    assert errors[torch.float32] < 0.7 * errors[None]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_kl_div_is_torchs(reduction, log_target):
    log_q, log_p = random(N, V).log_softmax(-1), (3 * random(N, V, seed=1)).log_softmax(-1)
    target = log_p if log_target else log_p.exp()
    if not log_target:
        target[:, ::5] = 0  # where 0 log 0 is 0
    loss = LigerKLDIVLoss(reduction=reduction, log_target=log_target)
    theirs = nn.KLDivLoss(reduction=reduction, log_target=log_target)
    assert isinstance(loss, nn.KLDivLoss)
    assert_same(value_and_grads(lambda x: loss(x, target), log_q), value_and_grads(lambda x: theirs(x, target), log_q))


def test_kl_div_knows_torchs_old_names():
    log_q, p = random(N, V).log_softmax(-1), random(N, V, seed=1).softmax(-1)
    with pytest.warns(UserWarning, match="size_average"):
        loss = LigerKLDIVLoss(1e-10, False)
    assert_same([loss(log_q, p)], [F.kl_div(log_q, p, reduction="sum")])


def jsd_of(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """(N,) from log-probabilities."""

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def some_labels(labelled: bool) -> tuple[Tensor | None, Tensor]:
    """Labels of which some are 7, to be ignored, or none; and which rows count."""
    target = labels(7) if labelled else None
    return target, torch.ones(N, dtype=torch.bool) if target is None else target != 7


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jsd_is_its_formula(beta, labelled):
    log_q, log_p = random(N, V).log_softmax(-1), (3 * random(N, V, seed=1)).log_softmax(-1)
    target, keep = some_labels(labelled)
    loss = LigerJSD(beta, ignore_index=7)
    got = value_and_grads(lambda x: loss(x, log_p, target), log_q)
    assert_same(got, value_and_grads(lambda x: jsd_of(x, log_p, beta)[keep].mean(), log_q))


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_tvd_is_its_formula(reduction, labelled):
    p, q = random(N, V).softmax(-1), (3 * random(N, V, seed=1)).softmax(-1)
    target, keep = some_labels(labelled)

    def formula(p):
        each = 0.5 * (p - q).abs() * keep[:, None]
        count = {"batchmean": keep.sum(), "mean": keep.sum() * V}.get(reduction, 1)
        return each if reduction == "none" else each.sum() / count

    loss = LigerTVDLoss(reduction, ignore_index=7)
    assert_same(value_and_grads(lambda p: loss(p, q, target), p), value_and_grads(formula, p))


def heads() -> dict[str, Tensor]:
    return {
        "student_input": random(N, H), "student_weight": random(V, H, seed=1),
        "teacher_input": random(N, H + 3, seed=2), "teacher_weight": random(V, H + 3, seed=4),
    }  # fmt: skip


@pytest.mark.parametrize(
    "beta, temperature, labelled", [(0.0, 2.0, True), (0.1, 2.0, False), (0.5, 1.0, True), (1.0, 2.0, True)]
)
def test_fused_linear_jsd_is_its_formula(beta, temperature, labelled):
    x, weight, teacher_x, teacher_weight = heads().values()
    target, keep = some_labels(labelled)
    log_p = (F.linear(teacher_x, teacher_weight) / temperature).log_softmax(-1)

    def formula(x, weight):
        return jsd_of((F.linear(x, weight) / temperature).log_softmax(-1), log_p, beta)[keep].mean()

    loss = LigerFusedLinearJSD(beta, ignore_index=7, temperature=temperature)
    got = value_and_grads(lambda x, w: loss(x, w, teacher_x, teacher_weight, target), x, weight)
    assert_same(got, value_and_grads(formula, x, weight))


def test_fused_linear_jsd_keeps_fp32_logits():
    """As Liger does: under bf16 heads the gradient errs less than that of bf16 logits."""
    inputs = {k: x.bfloat16() for k, x in heads().items()}
    exact = value_and_grads(
        lambda x: LigerFusedLinearJSD()(**{k: v.double() for k, v in inputs.items()} | {"student_input": x}),
        inputs["student_input"].double(),
    )[0]
    ours = LigerFusedLinearJSD()(**inputs)
    narrow = LigerFusedLinearDivergence("jsd")(**inputs).loss
    assert (ours - exact).abs() < 0.5 * (narrow - exact).abs()


def test_fused_linear_divergence_is_the_op():
    from liger_trainer.kernels.linear_divergence import linear_divergence

    inputs, target = heads(), labels()
    loss = LigerFusedLinearDivergence({"forward_kl": 0.7, "reverse_kl": 0.3}, temperature=2.0, ce_weight=0.1)
    got = loss(**inputs, shift_labels=target, num_items=5.0)
    wanted = linear_divergence(
        *inputs.values(), kind={"forward_kl": 0.7, "reverse_kl": 0.3}, temperature=2.0, ce_weight=0.1, labels=target,
        num_items=5.0,
    )  # fmt: skip
    assert got._fields == wanted._fields
    torch.testing.assert_close(got._asdict(), wanted._asdict(), rtol=0, atol=0)


def test_without_any_label_the_loss_is_zero():
    none = torch.full((N,), -100)
    log_q, log_p = random(N, V).log_softmax(-1), random(N, V, seed=1).log_softmax(-1)
    more = dict(return_z_loss=True, return_token_accuracy=True)
    outputs = [
        LigerCrossEntropyLoss(torch.ones(V), **more)(log_q.requires_grad_(), none),
        LigerFusedLinearCrossEntropyLoss(torch.ones(V), **more)(random(V, H).requires_grad_(), random(N, H), none),
    ]
    assert all(x.loss == x.z_loss == x.token_accuracy == 0 for x in outputs)
    losses = [LigerJSD()(log_q, log_p, none), LigerTVDLoss()(log_q.exp(), log_p.exp(), none)]
    losses.append(LigerFusedLinearJSD()(**heads(), shift_labels=none))
    assert all(x == 0 for x in losses)


def test_losses_are_fp32():
    x, log_p, target = random(N, V).bfloat16(), random(N, V, seed=1).log_softmax(-1).bfloat16(), labels()
    log_q = x.log_softmax(-1)
    given = [LigerCrossEntropyLoss()(x, target), LigerKLDIVLoss()(log_q, log_p.exp()), LigerJSD()(log_q, log_p)]
    given.append(LigerTVDLoss()(log_q.exp(), log_p.exp()))
    inputs = {k: v.bfloat16() for k, v in heads().items()}
    fused = LigerFusedLinearCrossEntropyLoss()(inputs["student_weight"], inputs["student_input"], target)
    assert all(loss.dtype == torch.float32 for loss in [*given, fused, LigerFusedLinearJSD()(**inputs)])


def test_a_target_may_have_a_gradient():
    log_q, log_p = random(N, V).log_softmax(-1), random(N, V, seed=1).log_softmax(-1)
    assert_same(
        value_and_grads(LigerKLDIVLoss(reduction="sum"), log_q, log_p.exp()),
        value_and_grads(nn.KLDivLoss(reduction="sum"), log_q, log_p.exp()),
    )
    for loss, formula, sides in (
        (LigerJSD(0.3), lambda q, p: jsd_of(q, p, 0.3).mean(), (log_q, log_p)),
        (LigerTVDLoss(), lambda q, p: (q - p).abs().sum() / (2 * N), (log_q.exp(), log_p.exp())),
    ):
        assert_same(value_and_grads(loss, *sides), value_and_grads(formula, *sides))


def test_losses_of_given_logits_compile_whole():
    torch._dynamo.reset()
    target = labels()

    class Losses(nn.Module):
        def __init__(self):
            super().__init__()
            self.ce = LigerCrossEntropyLoss(torch.ones(V), return_z_loss=True, lse_square_scale=1e-2, softcap=3.0)
            self.kl, self.jsd, self.tvd = LigerKLDIVLoss(reduction="batchmean"), LigerJSD(0.3), LigerTVDLoss()

        def forward(self, x, log_p):
            log_q, output = x.log_softmax(-1), self.ce(x, target)
            kl, tvd = self.kl(log_q, log_p.exp()), self.tvd(log_q.exp(), log_p.exp())
            return output.loss + output.z_loss + kl + self.jsd(log_q, log_p, target) + tvd

    losses, x, log_p = Losses(), random(N, V), random(N, V, seed=1).log_softmax(-1)
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    assert_same(value_and_grads(lambda x: compiled(x, log_p), x), value_and_grads(lambda x: losses(x, log_p), x))


REFUSED = [
    (lambda: LigerCrossEntropyLoss(reduction="batchmean"), "reduction must be"),
    (lambda: LigerCrossEntropyLoss(label_smoothing=1.0), "label_smoothing must lie"),
    (lambda: LigerCrossEntropyLoss(softcap=0.0), "softcap must be"),
    (lambda: LigerCrossEntropyLoss(torch.ones(3))(random(N, V), labels()), "weight must have"),
    (lambda: LigerFusedLinearCrossEntropyLoss(reduction="batchmean"), "reduction must be"),
    (lambda: LigerFusedLinearCrossEntropyLoss(label_smoothing=-0.1), "label_smoothing must lie"),
    (lambda: LigerFusedLinearCrossEntropyLoss(return_predicted_tokens=True), "return_predicted_tokens"),
    (lambda: LigerFusedLinearCrossEntropyLoss(torch.ones(V), label_smoothing=0.1), "ce_weight"),
    (lambda: LigerFusedLinearCrossEntropyLoss(torch.ones(V), lse_square_scale=0.1), "ce_weight"),
    (lambda: LigerFusedLinearCrossEntropyLoss(return_z_loss=True, label_smoothing=0.1), "return_z_loss"),
    (lambda: LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16), "accum_dtype"),
    (lambda: LigerFusedLinearCrossEntropyLoss(torch.ones(3))(random(V, H), random(N, H), labels()), "ce_weight must"),
    (lambda: LigerKLDIVLoss(eps=1e-3), "eps must lie"),
    (lambda: LigerKLDIVLoss(reduction="max"), "reduction must be"),
    (lambda: LigerJSD(beta=1.5), "beta must lie"),
    (lambda: LigerTVDLoss(reduction="max"), "reduction must be"),
    (lambda: LigerFusedLinearJSD(jsd_beta=-0.1), "jsd_beta must lie"),
    (lambda: LigerFusedLinearJSD(temperature=0.0), "temperature must be"),
    (lambda: LigerFusedLinearJSD(accum_dtype=torch.float16), "accum_dtype"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
