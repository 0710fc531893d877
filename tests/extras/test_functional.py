"""The functions of modules.functional against plain torch in fp64: argument order, defaults, values, gradients."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import assert_true

from liger_trainer.extras.modules import functional
from liger_trainer.extras.modules.losses import CrossEntropyOutput

N, H, V = 12, 8, 31


def labels(ignore_index: int = -100) -> torch.Tensor:
    y = torch.randint(V, (N,))
    y[::3] = ignore_index
    return y


def logits() -> torch.Tensor:
    return 3 * torch.randn(N, V)


def rms(x, w, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


def test_activations():
    a, b = torch.randn(3, 5, H), torch.randn(3, 5, H)
    assert_true(functional.liger_swiglu, lambda a, b: F.silu(a) * b, a, b)
    assert_true(functional.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, a, b)
    assert_true(functional.liger_relu_squared, lambda a: F.relu(a).square(), a)


def test_norms():
    x, residual, w, b = torch.randn(3, 5, H), torch.randn(3, 5, H), torch.randn(H), torch.randn(H)
    assert_true(lambda x, w: functional.liger_rms_norm(x, w, 1e-2), lambda x, w: rms(x, w, 1e-2), x, w)
    assert_true(lambda x, w: functional.liger_rms_norm(x, w, 1e-6, 1.0, "gemma"), lambda x, w: rms(x, 1 + w), x, w)
    assert_true(lambda x: functional.liger_rms_norm(x, None, 1e-6), lambda x: rms(x, 1), x)
    assert_true(
        lambda x, r, w: functional.liger_fused_add_rms_norm(x, r, w, 1e-2, 0.5),
        lambda x, r, w: (rms(x + r, 0.5 + w, 1e-2), x + r), x, residual, w,
    )  # fmt: skip
    assert_true(
        lambda x, w, scale, shift: functional.liger_modulated_rms_norm(x, w, scale, shift, 1e-2),
        lambda x, w, scale, shift: (1 + scale) * rms(x, w, 1e-2) + shift, x, w, b, torch.randn(H),
    )  # fmt: skip
    assert_true(
        lambda x, w, b: functional.liger_layer_norm(x, w, b, 1e-2), lambda x, w, b: F.layer_norm(x, (H,), w, b, 1e-2),
        x, w, b,
    )  # fmt: skip


@pytest.mark.parametrize("mode, dtype", [("llama", torch.float32), ("gemma", torch.bfloat16)])
def test_norms_cast_as_their_modules(mode, dtype):
    x, w = torch.randn(5, H).bfloat16(), torch.randn(H)
    assert functional.liger_rms_norm(x, w, 1e-6, 0.0, mode).dtype == dtype
    assert functional.liger_fused_add_rms_norm(x, x, w, 1e-6, 0.0, mode)[0].dtype == dtype


def test_rotations():
    q, k, angle = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), 6 * torch.rand(3, 2, 7, 8)

    def truth(angle):
        c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]

        def turn(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        return lambda q, k: (turn(q), turn(k))

    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    assert_true(lambda q, k: functional.liger_rope(q, k, cos[0], sin[0]), truth(angle[0]), q, k)
    assert_true(lambda q, k: functional.liger_rope(q, k, cos[0], sin[0], None, 1, 16), truth(angle[0]), q, k)
    mixed = torch.cat([angle[0, ..., :2], angle[1, ..., 2:5], angle[2, ..., 5:]], -1)
    assert_true(lambda q, k: functional.liger_qwen2vl_mrope(q, k, cos, sin, [2, 3, 3]), truth(mixed), q, k)


def test_cross_entropy():
    target, weight = labels(5), torch.rand(V) + 0.1

    def truth(x):
        x = 4 * torch.tanh(x / 4)
        options = dict(weight=weight.double(), ignore_index=5, reduction="sum", label_smoothing=0.1)
        return F.cross_entropy(x, target, **options) + 0.01 * x.logsumexp(-1).square()[target != 5].sum()

    assert_true(
        lambda x: functional.liger_cross_entropy(x, target, weight, None, 5, None, "sum", 0.1, 0.01, 4.0), truth,
        logits(), tolerance=1e-5,
    )  # fmt: skip
    assert_true(lambda x: functional.liger_cross_entropy(x, labels_), lambda x: F.cross_entropy(x, labels_), logits())
    output = functional.liger_cross_entropy(logits(), target, ignore_index=5, return_predicted_tokens=True)
    assert isinstance(output, CrossEntropyOutput) and output.predicted_tokens is not None and output.z_loss is None


labels_ = labels()


def test_fused_linear_cross_entropy():
    x, w, bias, classes, target = torch.randn(N, H), torch.randn(V, H), torch.randn(V), torch.rand(V) + 0.1, labels(5)
    assert_true(
        lambda x, w, b: functional.liger_fused_linear_cross_entropy(x, w, target, b, classes, 5, 0.0, 0.0, "sum", 4.0),
        lambda x, w, b: F.cross_entropy(
            4 * torch.tanh(F.linear(x, w, b) / 4), target, classes.double(), ignore_index=5, reduction="sum"
        ), x, w, bias, tolerance=1e-5,
    )  # fmt: skip
    smooth = dict(lse_square_scale=0.01, label_smoothing=0.1, chunk_mem_const=4)

    def truth(x, w):
        y = F.linear(x, w)
        z_loss = y.logsumexp(-1).square()[labels_ != -100].mean()
        return F.cross_entropy(y, labels_, label_smoothing=0.1) + 0.01 * z_loss

    assert_true(lambda x, w: functional.liger_fused_linear_cross_entropy(x, w, labels_, **smooth), truth, x, w)
    output = functional.liger_fused_linear_cross_entropy(x, w, labels_, return_token_accuracy=True)
    assert isinstance(output, CrossEntropyOutput) and output.token_accuracy is not None


def jsd(log_q, log_p, beta):
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    sides = beta * (log_p.exp() * (log_p - log_m)) + (1 - beta) * (log_q.exp() * (log_q - log_m))
    return sides.sum(-1)


def test_divergences_of_given_distributions():
    log_q, log_p, target = logits().log_softmax(-1), logits().log_softmax(-1), labels(7)
    keep = target != 7
    assert_true(
        lambda q, p: functional.liger_jsd(q, p, target, 0.3, 7), lambda q, p: jsd(q, p, 0.3)[keep].mean(), log_q, log_p
    )
    assert_true(functional.liger_jsd, lambda q, p: jsd(q, p, 0.5).mean(), log_q, log_p)
    assert_true(functional.liger_kl_div, lambda q, p: (p * (p.log() - q)).mean(), log_q, log_p.exp())
    assert_true(
        lambda q, p: functional.liger_kl_div(q, p, reduction="batchmean", log_target=True),
        lambda q, p: (p.exp() * (p - q)).sum() / N, log_q, log_p,
    )  # fmt: skip
    # the default is "mean", as in Liger-Kernel, whose module's is "batchmean"
    assert_true(functional.liger_tvd, lambda q, p: 0.5 * (q - p).abs().mean(), log_q.exp(), log_p.exp())
    assert_true(
        lambda q, p: functional.liger_tvd(q, p, target, "batchmean", 7),
        lambda q, p: 0.5 * (q - p).abs()[keep].sum() / keep.sum(), log_q.exp(), log_p.exp(),
    )  # fmt: skip


def test_divergences_of_linear_heads():
    x, w, teacher_x, teacher_w = torch.randn(N, H), torch.randn(V, H), torch.randn(N, H + 3), torch.randn(V, H + 3)
    target = labels(7)
    log_p = (F.linear(teacher_x.double(), teacher_w.double()) / 2).log_softmax(-1)
    p = log_p.exp().float()
    assert_true(
        lambda x, w: functional.liger_fused_linear_jsd(x, w, teacher_x, teacher_w, target, 0.3, 7, 2.0),
        lambda x, w: jsd((F.linear(x, w) / 2).log_softmax(-1), log_p, 0.3)[target != 7].mean(), x, w,
    )  # fmt: skip
    assert_true(
        lambda x, w: functional.liger_fused_linear_kl_div(x, w, p, target, "mean", 7, 2.0),
        lambda x, w: (p * (p.double().log() - (F.linear(x, w) / 2).log_softmax(-1)))[target != 7].mean(), x, w,
    )  # fmt: skip


REFUSED = [
    (lambda: functional.liger_cross_entropy(logits(), labels_, size_average=False), "size_average=False"),
    (lambda: functional.liger_cross_entropy(logits(), labels_, reduce=True), "reduce=True"),
    (lambda: functional.liger_kl_div(logits(), logits(), False), "size_average=False"),
    (lambda: functional.liger_kl_div(logits(), logits(), reduce=False), "reduce=False"),
    (lambda: functional.liger_rms_norm(logits(), None, 1e-6, 1.0), "offset 1.0"),
    (lambda: functional.liger_rms_norm(logits(), torch.ones(V), 1e-6, 0.0, "bf16"), "casting_mode must be"),
    (lambda: functional.liger_fused_add_rms_norm(logits(), logits(), torch.ones(V), 1e-6, 0.0, "?"), "casting_mode"),
    (lambda: functional.liger_modulated_rms_norm(logits(), None, torch.ones(V), casting_mode="?"), "casting_mode must"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


SIGNATURES = {  # of Liger-Kernel 0.8.5
    "liger_cross_entropy": "input target weight=None size_average=None ignore_index=-100 reduce=None reduction='mean' "
    "label_smoothing=0.0 lse_square_scale=0.0 softcap=None return_z_loss=False return_token_accuracy=False "
    "return_predicted_tokens=False",
    "liger_fused_linear_cross_entropy": "input weight target bias=None ce_weight=None ignore_index=-100 "
    "lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None return_z_loss=False accum_dtype=None "
    "use_token_scaling=False return_token_accuracy=False return_predicted_tokens=False chunk_mem_const=1",
    "liger_fused_linear_jsd": "student_input student_weight teacher_input teacher_weight shift_labels=None "
    "jsd_beta=0.5 ignore_index=-100 temperature=1.0 accum_dtype=None",
    "liger_fused_linear_kl_div": "student_input student_weight target shift_labels=None reduction='batchmean' "
    "ignore_index=-100 temperature=1.0 eps=1e-10 accum_dtype=None",
    "liger_geglu": "a b",
    "liger_jsd": "input target shift_labels=None beta=0.5 ignore_index=-100",
    "liger_kl_div": "input target size_average=True reduce=True reduction='mean' log_target=False eps=1e-10",
    "liger_tvd": "input target shift_labels=None reduction='mean' ignore_index=-100",
    "liger_layer_norm": "X W B eps",
    "liger_qwen2vl_mrope": "q k cos sin mrope_section unsqueeze_dim=1",
    "liger_relu_squared": "x",
    "liger_rms_norm": "X W eps offset=0.0 casting_mode='llama' in_place=True",
    "liger_modulated_rms_norm": "X W scale shift=None eps=1e-06 offset=0.0 casting_mode='llama' in_place=True",
    "liger_fused_add_rms_norm": "X R W eps offset=0.0 casting_mode='llama' in_place=True",
    "liger_rope": "q k cos sin position_ids=None unsqueeze_dim=1 rotary_dim=None",
    "liger_swiglu": "a b",
}


def test_signatures_are_ligers():
    ours = {}
    for name, function in inspect.getmembers(functional, inspect.isfunction):
        if function.__module__ == functional.__name__ and name.startswith("liger_"):
            parameters = inspect.signature(function).parameters.values()
            ours[name] = " ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert ours == SIGNATURES
