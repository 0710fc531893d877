"""The functions of modules.functional give what the modules of their names give, whose values are tested there: the
order of arguments, and the defaults, which differ for some. tests/project/public_surface.yaml has the signatures."""

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import assert_same, check, random
from torch import Tensor

import liger_trainer as lt
from liger_trainer.modules import functional as f

N, V = 12, 31
Q, K, W, B = random(2, 4, 7, 16), random(2, 2, 7, 16, seed=1), random(16, seed=2), random(16, seed=3)
ANGLES = random(3, 2, 7, 16, seed=4)
COS, SIN = ANGLES.cos(), ANGLES.sin()
LOGITS, LOG_Q, LOG_P = random(N, V), random(N, V, seed=1).log_softmax(-1), random(N, V, seed=2).log_softmax(-1)
X, HEAD, BIAS, CLASSES = random(N, 8), random(V, 8, seed=1), random(V, seed=2), random(V, seed=3).abs() + 0.1
TEACHER = random(N, 11, seed=4), random(V, 11, seed=5)
LABELS = torch.arange(N) % V


def rms(x, w, eps=1e-2):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


OPS = {  # the function, its formula, inputs
    "swiglu": (f.liger_swiglu, lambda a, b: F.silu(a) * b, Q, Q.flip(0)),
    "geglu": (f.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, Q, Q.flip(0)),
    "relu squared": (f.liger_relu_squared, lambda a: F.relu(a).square(), Q),
    "RMSNorm": (lambda x, w: f.liger_rms_norm(x, w, 1e-2), rms, Q, W),
    "RMSNorm of Gemma": (
        lambda x, w: f.liger_rms_norm(x, w, 1e-2, 1.0, "gemma"), lambda x, w: rms(x, 1 + w), Q, W
    ),
    "RMSNorm without weight": (lambda x: f.liger_rms_norm(x, None, 1e-2), lambda x: rms(x, 1), Q),
    "sum and RMSNorm": (
        lambda x, r, w: f.liger_fused_add_rms_norm(x, r, w, 1e-2, 0.5), lambda x, r, w: (rms(x + r, 0.5 + w), x + r),
        Q, Q.flip(0), W,
    ),
    "modulated RMSNorm": (
        lambda x, w, scale, shift: f.liger_modulated_rms_norm(x, w, scale, shift, 1e-2),
        lambda x, w, scale, shift: (1 + scale) * rms(x, w) + shift, Q, W, B, B.flip(0),
    ),
    "LayerNorm": (
        lambda x, w, b: f.liger_layer_norm(x, w, b, 1e-2), lambda x, w, b: F.layer_norm(x, (16,), w, b, 1e-2), Q, W, B
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ops(name):
    check(*OPS[name])


@pytest.mark.parametrize("mode, dtype", [("llama", torch.float32), ("gemma", torch.bfloat16)])
def test_norms_cast_as_their_modules(mode, dtype):
    x = Q.bfloat16()
    assert f.liger_rms_norm(x, W, 1e-6, 0.0, mode).dtype == dtype
    assert f.liger_fused_add_rms_norm(x, x, W, 1e-6, 0.0, mode)[0].dtype == dtype


CE = {"ignore_index": 5, "reduction": "sum", "label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 4.0}
CALLS = {  # the function by position, its module by name
    "rope": (f.liger_rope(Q, K, COS[0], SIN[0], None, 1, 16), lt.liger_rotary_pos_emb(Q, K, COS[0], SIN[0])),
    "mrope": (
        f.liger_qwen2vl_mrope(Q, K, COS, SIN, [2, 3, 3]),
        lt.liger_multimodal_rotary_pos_emb(Q, K, COS, SIN, mrope_section=[2, 3, 3]),
    ),
    "cross-entropy": (f.liger_cross_entropy(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS)),
    "cross-entropy, all": (
        f.liger_cross_entropy(LOGITS, LABELS, CLASSES, None, 5, None, "sum", 0.1, 0.01, 4.0, True, True, True),
        lt.LigerCrossEntropyLoss(
            weight=CLASSES, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, **CE
        )(LOGITS, LABELS),
    ),
    "linear cross-entropy": (
        f.liger_fused_linear_cross_entropy(X, HEAD, LABELS), F.cross_entropy(F.linear(X, HEAD), LABELS)
    ),
    "linear cross-entropy, all": (
        f.liger_fused_linear_cross_entropy(X, HEAD, LABELS, BIAS, None, 5, 0.01, 0.1, "sum", 4.0, chunk_mem_const=4),
        lt.LigerFusedLinearCrossEntropyLoss(**CE)(HEAD, X, LABELS, BIAS),
    ),
    "linear cross-entropy of classes": (
        f.liger_fused_linear_cross_entropy(
            X, HEAD, LABELS, None, CLASSES, use_token_scaling=True, return_token_accuracy=True
        ),
        lt.LigerFusedLinearCrossEntropyLoss(ce_weight=CLASSES, use_token_scaling=True, return_token_accuracy=True)(
            HEAD, X, LABELS
        ),
    ),
    "jsd": (f.liger_jsd(LOG_Q, LOG_P), lt.LigerJSD(beta=0.5)(LOG_Q, LOG_P)),
    "jsd, all": (f.liger_jsd(LOG_Q, LOG_P, LABELS, 0.3, 7), lt.LigerJSD(0.3, ignore_index=7)(LOG_Q, LOG_P, LABELS)),
    # the default is "mean", as in Liger-Kernel, whose modules' is "batchmean"
    "kl": (f.liger_kl_div(LOG_Q, LOG_P.exp()), F.kl_div(LOG_Q, LOG_P.exp(), reduction="none").mean()),
    "kl, all": (
        f.liger_kl_div(LOG_Q, LOG_P, reduction="batchmean", log_target=True),
        lt.LigerKLDIVLoss(reduction="batchmean", log_target=True)(LOG_Q, LOG_P),
    ),
    "tvd": (f.liger_tvd(LOG_Q.exp(), LOG_P.exp()), lt.LigerTVDLoss("mean")(LOG_Q.exp(), LOG_P.exp())),
    "tvd, all": (
        f.liger_tvd(LOG_Q.exp(), LOG_P.exp(), LABELS, "batchmean", 7),
        lt.LigerTVDLoss("batchmean", ignore_index=7)(LOG_Q.exp(), LOG_P.exp(), LABELS),
    ),
    "linear jsd": (
        f.liger_fused_linear_jsd(X, HEAD, *TEACHER, LABELS, 0.3, 7, 2.0),
        lt.LigerFusedLinearJSD(jsd_beta=0.3, ignore_index=7, temperature=2.0)(X, HEAD, *TEACHER, LABELS),
    ),
    "linear kl": (
        f.liger_fused_linear_kl_div(X, HEAD, LOG_P.exp(), LABELS, "mean", 7, 2.0),
        lt.LigerFusedLinearKLDivLoss(reduction="mean", ignore_index=7, temperature=2.0)(X, HEAD, LOG_P.exp(), LABELS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_their_modules(name):
    sides = []
    for result in CALLS[name]:
        each = vars(result).values() if isinstance(result, f.CrossEntropyOutput) else result
        sides.append([result] if isinstance(result, Tensor) else [x for x in each if x is not None])
    assert_same(*sides, tolerance=1e-5)


def test_further_outputs_have_names():
    output = f.liger_cross_entropy(LOGITS, LABELS, return_predicted_tokens=True)
    assert isinstance(output, f.CrossEntropyOutput) and output.predicted_tokens is not None and output.z_loss is None


REFUSED = [
    (lambda: f.liger_cross_entropy(LOGITS, LABELS, size_average=False), "size_average=False"),
    (lambda: f.liger_cross_entropy(LOGITS, LABELS, reduce=True), "reduce=True"),
    (lambda: f.liger_kl_div(LOGITS, LOGITS, False), "size_average=False"),
    (lambda: f.liger_kl_div(LOGITS, LOGITS, reduce=False), "reduce=False"),
    (lambda: f.liger_rms_norm(LOGITS, None, 1e-6, 1.0), "offset 1.0"),
    (lambda: f.liger_rms_norm(LOGITS, torch.ones(V), 1e-6, 0.0, "bf16"), "casting_mode must be"),
    (lambda: f.liger_fused_add_rms_norm(LOGITS, LOGITS, torch.ones(V), 1e-6, 0.0, "?"), "casting_mode"),
    (lambda: f.liger_modulated_rms_norm(LOGITS, None, torch.ones(V), casting_mode="?"), "casting_mode must"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
