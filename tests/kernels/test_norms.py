"""What is of one of the norms: where it rounds, the sum of a stream, what torch computes."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import Place, check, set_path
from op_table import CASES
from small_blocks import home
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from liger_trainer.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from liger_trainer.kernels.gated_rms_norm import gated_rms_norm
from liger_trainer.kernels.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.rms_norm import rms_norm, rms_norm_reference

ADDED = ("x", "residual", "weight")


def test_rounds_as_hugging_face_models_do(place):
    """Bit for bit in torch; the kernels sum in another order, so a row's rstd may differ in its last bit."""
    x, weight = CASES["rms_norm"].inputs(place, rows=64, hidden=96).values()
    if place.dtype == torch.float64:
        pytest.skip("the models' norms compute fp64 in fp32")
    results = []
    options_of = {LlamaRMSNorm: {"cast_before_weight": True}, GemmaRMSNorm: {"offset": 1.0}, Olmo2RMSNorm: {}}
    for model_norm, options in options_of.items():
        layer = model_norm(96, eps=1e-5).to(x)
        layer.weight.data.copy_(weight)
        with torch.no_grad():
            expected, got = layer(x), rms_norm(x, weight, 1e-5, **options)
        assert got.dtype == expected.dtype
        if place.path == "torch":
            assert torch.equal(got, expected), model_norm
        elif place.dtype != torch.float32:
            assert (got == expected).float().mean() > 0.99, model_norm
        results.append(got)
    llama, gemma, olmo = results
    if place.dtype != torch.float32:
        assert (llama != olmo).float().mean() > 0.05, "where the cast is must show"
    torch.testing.assert_close(gemma, rms_norm(x, weight.float() + 1, 1e-5))


def test_norm_is_that_of_the_rounded_sum(place):
    tensors = CASES["add_rms_norm"].inputs(place)
    normed, summed = add_rms_norm(**tensors, cast_before_weight=True)
    assert torch.equal(summed, tensors["x"] + tensors["residual"])
    assert torch.equal(normed, rms_norm(summed, tensors["weight"], cast_before_weight=True))


def test_layers_in_a_row_share_one_stream(fp32):
    """The gradient of the stream passes through each layer's norm and sum."""

    def layers(op):
        def result(x, residual, weight):
            for _ in range(3):
                x, residual = op(x.tanh(), residual, weight)
            return x, residual

        return result

    check(layers(add_rms_norm), layers(add_rms_norm_reference), CASES["add_rms_norm"].inputs(fp32), None, leaves=ADDED)


def test_writing_over_the_saved_sum_is_noticed(fp32):
    tensors = {k: x.requires_grad_() for k, x in CASES["add_rms_norm"].inputs(fp32).items()}
    normed, summed = add_rms_norm(**tensors)
    summed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (normed.sum() + summed.sum()).backward()


def test_layer_norm_is_that_of_torch(place):
    tensors = CASES["layer_norm"].inputs(place)
    expected = F.layer_norm(tensors["x"], (24,), tensors["weight"], tensors["bias"], 1e-5)
    torch.testing.assert_close(layer_norm(**tensors), expected)


def test_rows_far_from_zero(fp32):
    """The variance is taken after the mean is subtracted; E[x^2] - E[x]^2 would leave none of these digits."""
    tensors = CASES["layer_norm"].inputs(fp32)
    check(layer_norm, layer_norm_reference, tensors | {"x": tensors["x"] + 3000}, None, leaves=("x", "weight", "bias"))


def by_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    y = layer_norm(x.detach().requires_grad_(), weight, bias)
    return "NativeLayerNorm" in y.grad_fn.name()


@pytest.mark.gpu
def test_small_layer_norms_are_left_to_torch_on_gpu(monkeypatch):
    """Where its kernels give the same: fp32 inside, rounded once."""
    monkeypatch.setattr(home("layer_norm", "TORCH_NUMBERS"), "TORCH_NUMBERS", 32)
    x, w = torch.rand(4, 8, device="cuda"), torch.rand(8, device="cuda")
    for inputs in ((x, w, w), (x, w, None), (x.half(), w.half(), w.half())):
        assert by_torch(*inputs)
    others = [(torch.rand(5, 8, device="cuda"), w, w), (x[:0], w, w), (x, None, None), (x, None, w),
              (x.t().contiguous().t(), w, w), (x.half(), w, None), (x, w, w.half())]  # fmt: skip
    assert not any(by_torch(*inputs) for inputs in others)
    with torch.autocast("cuda", torch.bfloat16):  # torch's would return fp32
        assert not by_torch(x.bfloat16(), w.bfloat16(), None)
    monkeypatch.setattr(home("layer_norm", "TORCH_NUMBERS"), "TORCH_NUMBERS", 2**22)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors = CASES["layer_norm"].inputs(Place("triton", "cuda", dtype), rows=512, hidden=4096)
        assert by_torch(**tensors)
        check(layer_norm, layer_norm_reference, tensors, None, leaves=("x", "weight", "bias"))


@pytest.mark.parametrize("kind", ["qwen3_next", "zamba2"])
def test_gated_norm_is_the_layer_of_transformers(fp32, kind):
    own = Qwen3NextRMSNormGated(24, 1e-5) if kind == "qwen3_next" else Zamba2RMSNormGated(24, 8, 1e-5)
    tensors = CASES["gated_rms_norm"].inputs(fp32)
    own.to(fp32.device).weight.data = tensors["weight"]
    form = {} if kind == "qwen3_next" else {"gate_first": True, "groups": 3}
    got = gated_rms_norm(tensors["x"], tensors["gate"], tensors["weight"], 1e-5, **form)
    torch.testing.assert_close(got, own(tensors["x"], tensors["gate"]).detach())


@pytest.mark.parametrize("form", ["", "gate first"])
def test_gated_norms_with_wider_weights(place, form):
    """Behind the gate the weight is the last factor, so the output has its dtype."""
    if place.dtype.itemsize > 2:
        pytest.skip("there is nothing wider")
    case = CASES[f"gated_rms_norm{', ' * bool(form)}{form}"]
    tensors = case.inputs(place)
    tensors["weight"] = tensors["weight"].float()
    got = check(case.function, case.reference, tensors, None, leaves=case.leaves, **case.options)
    assert got["out0"].dtype == (torch.float32 if form else place.dtype)


@pytest.mark.gpu
def test_bf16_is_rounded_where_the_models_round_it_on_gpu():
    """All but the entries at which rstd's last bit decides."""
    x, weight = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((2048, 4096), (4096,)))
    for cast in (False, True):
        expected = rms_norm_reference(x, weight, cast_before_weight=cast)
        assert (rms_norm(x, weight, cast_before_weight=cast) == expected).float().mean() > 0.999


def test_the_torch_path_is_tested_without_triton(monkeypatch):
    """What `place` promises: on its torch path no kernel is launched."""
    set_path(monkeypatch, "torch")
    y = rms_norm(torch.rand(2, 4).requires_grad_())
    assert "RMSNorm" not in y.grad_fn.name()
