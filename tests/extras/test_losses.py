"""The losses of modules/ against torch's and their formulas in fp64: values, gradients, further outputs."""

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import assert_same, check, random, results
from torch import Tensor, nn

from liger_trainer import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedCETVDLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDivergence,
    LigerFusedLinearJSD,
    LigerFusedLinearKLDivLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)
from liger_trainer.extras.modules import losses as chunked
from liger_trainer.kernels import _linear_loss
from liger_trainer.kernels.linear_divergence import linear_divergence

N, H, V = 12, 8, 31
REDUCTIONS = ("mean", "sum", "none")
LOGITS = 3 * random(N, V, seed=1)
LOG_Q, LOG_P = random(N, V).log_softmax(-1), LOGITS.log_softmax(-1)
X, HEAD, BIAS = random(N, H, seed=2), random(V, H), random(V, seed=1)
CLASSES = random(V, seed=5).abs() + 0.1


def labels(ignore_index: int = -100) -> Tensor:
    y = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
    y[::3] = ignore_index
    return y


def some_labels(labelled: bool) -> tuple[Tensor | None, Tensor]:
    """Labels of which some are 7, to be ignored, or none; and which rows count."""
    target = labels(7) if labelled else None
    return target, torch.ones(N, dtype=torch.bool) if target is None else target != 7


# Cross-entropy


def cross_entropy(logits: Tensor, target: Tensor, z=0.0, softcap=None, scaled=False, **options) -> Tensor:
    """torch's loss with what Liger's adds to it."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    reduction, keep = options.pop("reduction", "mean"), target != options.get("ignore_index", -100)
    weight = options.pop("weight", None)
    weight = None if weight is None else weight.to(x)
    ce = F.cross_entropy(x, target, weight, reduction="none", **options)
    z_loss = (z * x.logsumexp(-1).square()).where(keep, 0)
    if scaled:
        p = x.softmax(-1).gather(1, target.where(keep, 0)[:, None]).squeeze(1).detach()
        ce, z_loss = ce * p, z_loss * p
    if reduction == "none":
        return ce + z_loss
    if reduction == "sum":
        return (ce + z_loss).sum()
    count = keep.sum() if weight is None else weight[target.where(keep, 0)][keep].sum()
    return ce.sum() / count + z_loss.sum() / keep.sum()  # as Liger-Kernel 0.8.5: the z-loss has no class weight


CE = {  # what both are called with, by Liger's names
    "plain": {}, "ignore-index": {"ignore_index": 5}, "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 2.0}, "z-loss": {"lse_square_scale": 1e-2},
    "all": {"label_smoothing": 0.2, "softcap": 2.0, "lse_square_scale": 1e-2},
    "weighted": {"weight": CLASSES},
    "weighted, all": {"weight": CLASSES, "label_smoothing": 0.2, "softcap": 2.0, "lse_square_scale": 1e-2},
}  # fmt: skip
FUSED = {
    **{name: options for name, options in CE.items() if "weight" not in options}, "class weight": {"weight": CLASSES},
    "token scaling": {"use_token_scaling": True, "lse_square_scale": 1e-2},
    "both": {"weight": CLASSES, "use_token_scaling": True},
}  # fmt: skip
OTHER_NAMES = {"lse_square_scale": "z", "use_token_scaling": "scaled"}


def truth_of(target: Tensor, options: dict, reduction: str):
    """The formula of logits."""
    named = {OTHER_NAMES.get(name, name): value for name, value in options.items()}
    return lambda logits: cross_entropy(logits, target, reduction=reduction, **named)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", CE)
def test_cross_entropy_is_torchs(case, reduction):
    target = labels(CE[case].get("ignore_index", -100))
    loss = LigerCrossEntropyLoss(reduction=reduction, **CE[case])
    check(lambda x: loss(x, target), truth_of(target, CE[case], reduction), LOGITS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", FUSED)
def test_fused_linear_cross_entropy_is_torchs(case, reduction):
    options, target = FUSED[case], labels(FUSED[case].get("ignore_index", -100))
    ours = {"ce_weight" if name == "weight" else name: value for name, value in options.items()}
    loss, truth = LigerFusedLinearCrossEntropyLoss(reduction=reduction, **ours), truth_of(target, options, reduction)
    check(lambda w, x, b: loss(w, x, target, b), lambda w, x, b: truth(F.linear(x, w, b)), HEAD, X, BIAS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_in_place(reduction):
    """The gradient lies where the logits lay, and is the same; what is returned besides the loss is taken before."""
    head, target = nn.Linear(H, V), labels()
    options = dict(reduction=reduction, lse_square_scale=1e-2, return_z_loss=True, return_predicted_tokens=True)
    logits = head(X)
    before, memory = logits.detach().clone(), logits.data_ptr()
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    seen = []
    output = LigerCrossEntropyLoss(**options, inplace=True)(logits, target)
    got = torch.autograd.grad(output.loss.sum(), list(head.parameters()))
    expected = LigerCrossEntropyLoss(**options)(head(X), target)
    assert_same(got, torch.autograd.grad(expected.loss.sum(), list(head.parameters())))
    assert seen == [memory] and not torch.equal(logits.detach(), before)
    assert_same([output.z_loss], [expected.z_loss])
    assert torch.equal(output.predicted_tokens, expected.predicted_tokens)


MORE = [
    *((False, options) for options in ({}, {"label_smoothing": 0.1, "softcap": 2.0, "weight": CLASSES},
                                       {"label_smoothing": 0.1})),
    *((True, options) for options in ({}, {"use_token_scaling": True})),
]  # fmt: skip


@pytest.mark.parametrize("fused, options", MORE)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropies_return_more(reduction, fused, options):
    logits = F.linear(X, HEAD) if fused else LOGITS
    target, best = labels(), logits.argmax(-1)
    target[1:6:2] = best[1:6:2]
    keep = target != -100
    how = dict(reduction=reduction, lse_square_scale=1e-2, return_z_loss=True, return_token_accuracy=True, **options)
    if fused:
        output = LigerFusedLinearCrossEntropyLoss(**how)(HEAD.clone().requires_grad_(), X, target)
    else:
        output = LigerCrossEntropyLoss(**how, return_predicted_tokens=True)(logits.clone().requires_grad_(), target)
        assert torch.equal(output.predicted_tokens, best.where(keep, -1))
    whole, plain = (
        truth_of(target, {**options, **z}, reduction)(logits.double()) for z in ({"lse_square_scale": 1e-2}, {})
    )
    right = ((best == target) & keep).float()
    assert_same([output.loss], [whole])
    assert_same([output.z_loss], [whole - plain], tolerance=1e-4)
    assert_same([output.token_accuracy], [right if reduction == "none" else right.sum() / keep.sum()])
    assert not output.z_loss.requires_grad


def test_only_what_is_asked_for_is_returned():
    target = labels()
    for loss, inputs, names in (
        (LigerCrossEntropyLoss, (LOGITS,), ("z_loss", "token_accuracy", "predicted_tokens")),
        (LigerFusedLinearCrossEntropyLoss, (nn.Parameter(HEAD.clone()), X), ("z_loss", "token_accuracy")),
    ):
        assert isinstance(loss()(*inputs, target), Tensor)
        for name in names:
            output = loss(**{f"return_{name}": True})(*inputs, target)
            assert isinstance(output, CrossEntropyOutput)
            assert {each for each in names if getattr(output, each) is not None} == {name}


def test_class_weights_move_with_the_module_and_stay_out_of_its_state():
    for loss in (LigerCrossEntropyLoss(torch.ones(V)), LigerFusedLinearCrossEntropyLoss(torch.ones(V))):
        (weight,) = loss.to(torch.float64).buffers()
        assert weight.dtype == torch.float64 and not loss.state_dict()


def test_fused_linear_cross_entropy_sums_in_fp32(monkeypatch):
    """Over several chunks of bf16, the head's gradient errs less with accum_dtype."""
    monkeypatch.setattr(_linear_loss, "WORKSPACE_MB", 16 * V / 2**20)  # chunks of 8 rows
    monkeypatch.setattr(_linear_loss, "ROUNDINGS", 64)  # of which so many are summed in fp32 by default
    weight, x = HEAD.bfloat16(), random(512, H, seed=1).bfloat16()
    target = torch.arange(512) % V
    truth = results(lambda w: F.cross_entropy(F.linear(x.double(), w), target), [weight.double()])[1]
    errors = {}
    for dtype in (None, torch.float32):
        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype)
        errors[dtype] = (results(lambda w, loss=loss: loss(w, x, target), [weight])[1].double() - truth).norm()
    assert errors[torch.float32] < 0.7 * errors[None]


# Divergences of given distributions


def kl_to(log_q: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    """(N, V), where 0 log 0 is 0."""
    return target.exp() * (target - log_q) if log_target else torch.xlogy(target, target) - target * log_q


def jsd_of(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """(N,) from log-probabilities."""
    if beta in (0, 1):
        return (kl_to(log_p, log_q, True) if beta else kl_to(log_q, log_p, True)).sum(-1)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return (beta * kl_to(log_m, log_p, True) + (1 - beta) * kl_to(log_m, log_q, True)).sum(-1)


def reduced(each: Tensor, keep: Tensor, reduction: str) -> Tensor:
    each = each * keep[:, None]
    count = {"batchmean": keep.sum(), "mean": keep.sum() * V}.get(reduction, 1)
    return each if reduction == "none" else each.sum() / count


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "batchmean"])
def test_kl_div_is_torchs(reduction, log_target):
    target = LOG_P if log_target else LOG_P.exp() * (torch.arange(V) % 5 > 0)  # zeros, where 0 log 0 is 0
    loss, theirs = (kind(reduction=reduction, log_target=log_target) for kind in (LigerKLDIVLoss, nn.KLDivLoss))
    assert isinstance(loss, nn.KLDivLoss)
    check(lambda x: loss(x, target), lambda x: theirs(x, target.double()), LOG_Q)


def test_kl_div_knows_torchs_old_names():
    with pytest.warns(UserWarning, match="size_average"):
        loss = LigerKLDIVLoss(1e-10, False)
    assert_same([loss(LOG_Q, LOG_P.exp())], [F.kl_div(LOG_Q, LOG_P.exp(), reduction="sum")])


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jsd_is_its_formula(beta, labelled):
    target, keep = some_labels(labelled)
    loss = LigerJSD(beta, ignore_index=7)
    check(lambda x: loss(x, LOG_P, target), lambda x: jsd_of(x, LOG_P.double(), beta)[keep].mean(), LOG_Q)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "batchmean"])
def test_tvd_is_its_formula(reduction, labelled):
    target, keep = some_labels(labelled)
    loss, q = LigerTVDLoss(reduction, ignore_index=7), LOG_P.exp()
    check(lambda p: loss(p, q, target), lambda p: reduced(0.5 * (p - q).abs(), keep, reduction), LOG_Q.exp())


def test_a_target_may_have_a_gradient():
    p, q = LOG_P.exp(), LOG_Q.exp()
    check(LigerKLDIVLoss(reduction="sum"), lambda x, target: kl_to(x, target).sum(), LOG_Q, p)
    check(LigerJSD(0.3), lambda x, target: jsd_of(x, target, 0.3).mean(), LOG_Q, LOG_P)
    check(LigerTVDLoss(), lambda x, target: (x - target).abs().sum() / (2 * N), q, p)


# Divergences of heads, and of a teacher


def heads(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {
        "student_input": random(N, H), "student_weight": random(V, H, seed=1),
        "teacher_input": random(N, H + 3, seed=2), "teacher_weight": random(V, H + 3, seed=4),
    }  # fmt: skip
    return {name: x.to(dtype) for name, x in tensors.items()}


@pytest.mark.parametrize(
    "beta, temperature, labelled", [(0.0, 2.0, True), (0.1, 2.0, False), (0.5, 1.0, True), (1.0, 2.0, True)]
)
def test_fused_linear_jsd_is_its_formula(beta, temperature, labelled):
    x, weight, teacher_x, teacher_weight = heads().values()
    target, keep = some_labels(labelled)
    log_p = (F.linear(teacher_x.double(), teacher_weight.double()) / temperature).log_softmax(-1)

    def formula(x, weight):
        return jsd_of((F.linear(x, weight) / temperature).log_softmax(-1), log_p, beta)[keep].mean()

    loss = LigerFusedLinearJSD(beta, ignore_index=7, temperature=temperature)
    check(lambda x, w: loss(x, w, teacher_x, teacher_weight, target), formula, x, weight)


def test_fused_linear_jsd_keeps_fp32_logits():
    """As Liger does: bf16 heads err less than with bf16 logits."""
    inputs = heads(torch.bfloat16)
    exact = LigerFusedLinearJSD()(**{k: v.double() for k, v in inputs.items()})
    narrow = LigerFusedLinearDivergence("jsd")(**inputs).loss
    assert (LigerFusedLinearJSD()(**inputs) - exact).abs() < 0.5 * (narrow - exact).abs()


def test_fused_linear_divergence_is_the_op():
    options = {"kind": {"forward_kl": 0.7, "reverse_kl": 0.3}, "temperature": 2.0, "ce_weight": 0.1}
    got = LigerFusedLinearDivergence(**options)(**heads(), shift_labels=labels(), num_items=5.0)
    wanted = linear_divergence(*heads().values(), **options, labels=labels(), num_items=5.0)
    assert got._fields == wanted._fields
    torch.testing.assert_close(got._asdict(), wanted._asdict(), rtol=0, atol=0)


@pytest.mark.parametrize("ignore_index", [7, -100])
def test_cross_entropy_and_total_variation_of_each_token(ignore_index):
    target = labels(ignore_index)
    keep = target != ignore_index

    def truth(student, teacher):
        hard = F.cross_entropy(student, target, reduction="none", ignore_index=ignore_index)
        return hard, 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) * keep

    loss = LigerFusedCETVDLoss(ignore_index)
    check(lambda s, t: loss(s, t, target), truth, LOGITS, 3 * random(N, V))
    assert all(x.dtype == torch.float32 for x in loss(LOGITS.bfloat16(), LOGITS, target))


def kl_truth(keep, reduction, temperature):
    return lambda x, weight, target: reduced(
        kl_to((F.linear(x, weight) / temperature).log_softmax(-1), target), keep, reduction
    )


@pytest.mark.parametrize("rows", [1, 5, N])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("reduction, temperature", [("batchmean", 1.0), ("mean", 2.0), ("sum", 0.7)])
def test_fused_linear_kl_div(reduction, temperature, labelled, rows, monkeypatch):
    """Chunks of so many rows. The targets need not sum to 1, as rounded ones do not; some are 0."""
    monkeypatch.setattr(chunked, "CHUNK", rows * V + V - 1)
    target, keep = some_labels(labelled)
    loss = LigerFusedLinearKLDivLoss(reduction, ignore_index=7, temperature=temperature)
    check(lambda x, w, t: loss(x, w, t, target), kl_truth(keep, reduction, temperature), X, HEAD, torch.rand(N, V) / V)
    given = F.one_hot(labels(7), V).float()
    check(lambda x, w: loss(x, w, given, target),
          lambda x, w: kl_truth(keep, reduction, temperature)(x, w, given.double()), X, HEAD)  # fmt: skip


def test_fused_linear_kl_div_stores_no_logits(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", 4 * V)
    kept, products, target = [], [], torch.rand(N, V)
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: products.append(len(x)) or linear(x, w))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = LigerFusedLinearKLDivLoss()(X.clone().requires_grad_(), HEAD, target)
    mine = target.untyped_storage().data_ptr()
    assert not [t for t in kept if t.shape[-1:] == (V,) and t.untyped_storage().data_ptr() != mine]
    loss.backward()
    assert products == [4] * 6


def test_fused_linear_kl_div_of_bf16():
    x, weight, target = X.bfloat16().requires_grad_(), HEAD.bfloat16(), LOG_P.exp().bfloat16()
    every = torch.ones(N, dtype=torch.bool)
    truth = kl_truth(every, "batchmean", 1.0)(*(t.detach().double() for t in (x, weight, target)))
    with torch.autocast("cpu", torch.bfloat16):
        under = LigerFusedLinearKLDivLoss()(x.float(), weight.float(), target)
    for loss in (LigerFusedLinearKLDivLoss()(x, weight, target), under):
        assert loss.dtype == torch.float32 and (loss - truth).abs() < 0.01 * truth


# All of them


def test_without_any_label_the_loss_is_zero():
    none, more = torch.full((N,), -100), dict(return_z_loss=True, return_token_accuracy=True)
    outputs = [
        LigerCrossEntropyLoss(torch.ones(V), **more)(LOGITS.clone().requires_grad_(), none),
        LigerFusedLinearCrossEntropyLoss(torch.ones(V), **more)(HEAD.clone().requires_grad_(), X, none),
    ]
    assert all(x.loss == x.z_loss == x.token_accuracy == 0 for x in outputs)
    losses = [LigerJSD()(LOG_Q, LOG_P, none), LigerTVDLoss()(LOG_Q.exp(), LOG_P.exp(), none)]
    losses.append(LigerFusedLinearJSD()(**heads(), shift_labels=none))
    x = X.clone().requires_grad_()
    losses.append(LigerFusedLinearKLDivLoss()(x, HEAD, LOG_P.exp(), none))
    assert all(loss == 0 for loss in losses) and not torch.autograd.grad(losses[-1], x)[0].any()


def test_losses_are_fp32():
    log_q, log_p, inputs = LOG_Q.bfloat16(), LOG_P.bfloat16(), heads(torch.bfloat16)
    losses = [
        LigerCrossEntropyLoss()(log_q, labels()), LigerKLDIVLoss()(log_q, log_p.exp()), LigerJSD()(log_q, log_p),
        LigerTVDLoss()(log_q.exp(), log_p.exp()), LigerFusedLinearJSD()(**inputs),
        LigerFusedLinearCrossEntropyLoss()(inputs["student_weight"], inputs["student_input"], labels()),
    ]  # fmt: skip
    assert all(loss.dtype == torch.float32 for loss in losses)


def test_on_the_kernels(kernels, monkeypatch):
    test_cross_entropy_and_total_variation_of_each_token(7)
    test_fused_linear_kl_div("mean", 2.0, True, 5, monkeypatch)


def test_losses_of_given_logits_compile_whole():
    torch._dynamo.reset()
    target = labels()

    class Losses(nn.Module):
        def __init__(self):
            super().__init__()
            self.ce = LigerCrossEntropyLoss(torch.ones(V), return_z_loss=True, lse_square_scale=1e-2, softcap=3.0)
            self.kl, self.jsd, self.tvd = LigerKLDIVLoss(reduction="batchmean"), LigerJSD(0.3), LigerTVDLoss()

        def forward(self, x):
            log_q, output = x.log_softmax(-1), self.ce(x, target)
            kl, tvd = self.kl(log_q, LOG_P.exp()), self.tvd(log_q.exp(), LOG_P.exp())
            return output.loss + output.z_loss + kl + self.jsd(log_q, LOG_P, target) + tvd

    losses = Losses()
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, [LOG_Q]), results(losses, [LOG_Q]))


def kl(*shapes, **options):
    return LigerFusedLinearKLDivLoss(**options)(*(torch.rand(shape) for shape in shapes))


REFUSED = [
    (lambda: LigerCrossEntropyLoss(reduction="batchmean"), "reduction must be"),
    (lambda: LigerCrossEntropyLoss(label_smoothing=1.0), "label_smoothing must lie"),
    (lambda: LigerCrossEntropyLoss(softcap=0.0), "softcap must be"),
    (lambda: LigerCrossEntropyLoss(torch.ones(3))(LOGITS, labels()), "weight must have"),
    (lambda: LigerFusedLinearCrossEntropyLoss(reduction="batchmean"), "reduction must be"),
    (lambda: LigerFusedLinearCrossEntropyLoss(label_smoothing=-0.1), "label_smoothing must lie"),
    (lambda: LigerFusedLinearCrossEntropyLoss(return_predicted_tokens=True), "return_predicted_tokens"),
    (lambda: LigerFusedLinearCrossEntropyLoss(torch.ones(V), label_smoothing=0.1), "ce_weight"),
    (lambda: LigerFusedLinearCrossEntropyLoss(torch.ones(V), lse_square_scale=0.1), "ce_weight"),
    (lambda: LigerFusedLinearCrossEntropyLoss(return_z_loss=True, label_smoothing=0.1), "return_z_loss"),
    (lambda: LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16), "accum_dtype"),
    (lambda: LigerFusedLinearCrossEntropyLoss(torch.ones(3))(HEAD, X, labels()), "ce_weight must"),
    (lambda: LigerKLDIVLoss(eps=1e-3), "eps must lie"),
    (lambda: LigerKLDIVLoss(reduction="max"), "reduction must be"),
    (lambda: LigerJSD(beta=1.5), "beta must lie"),
    (lambda: LigerTVDLoss(reduction="max"), "reduction must be"),
    (lambda: LigerFusedLinearJSD(jsd_beta=-0.1), "jsd_beta must lie"),
    (lambda: LigerFusedLinearJSD(temperature=0.0), "temperature must be"),
    (lambda: LigerFusedLinearJSD(accum_dtype=torch.float16), "accum_dtype"),
    (lambda: LigerFusedLinearKLDivLoss("none"), "reduction must be"),
    (lambda: LigerFusedLinearKLDivLoss(temperature=0.0), "temperature must be"),
    (lambda: LigerFusedLinearKLDivLoss(eps=1e-3), "eps must lie"),
    (lambda: LigerFusedLinearKLDivLoss(accum_dtype=torch.float32), "accum_dtype must be None"),
    (lambda: kl((N, H), (V, H + 1), (N, V)), "student_input must be"),
    (lambda: kl((N, H), (V, H), (N, V + 1)), "student_input must be"),
    (lambda: kl((N, H), (V, H), (1, V)), "student_input must be"),
    (lambda: kl((N, H), (V, H), (N, V), (N + 1,)), "shift_labels must be"),
    (lambda: LigerFusedCETVDLoss()(LOGITS, LOGITS, torch.zeros(3, dtype=torch.int64)), "labels"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
