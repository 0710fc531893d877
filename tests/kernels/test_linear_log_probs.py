"""linear_log_probs beside plain torch in fp64: values, and gradients of each token's log-probability and entropy."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import check, evaluate, random_inputs, set_path, under_autocast
from torch import Tensor

from liger_trainer.kernels import _linear_head, _linear_loss
from liger_trainer.kernels import linear_log_probs as file
from liger_trainer.kernels._linear_head import RowSelection
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.kernels.types import Lora

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 4.0},
    "temperature": {"temperature": 1.7},
    "sharp": {"temperature": 0.6},
    "all": {"scale": 1.7, "softcap": 6.0, "temperature": 1.3, "mean_logits": True},
}
FROZEN = {"trained": (), "frozen head": ("weight", "bias"), "frozen hidden": ("hidden",)}
frozen_parts = pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)


class Values(NamedTuple):
    loss: Tensor  # what has the upstream gradient
    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logit: Tensor


def differentiable(op, entropy: bool):
    """`op` with the values that get a gradient as its loss: log-probabilities, and behind them the entropies."""

    def run(**inputs) -> Values:
        out = op(**inputs)
        loss = torch.cat([out.log_prob, out.entropy]) if entropy else out.log_prob
        return Values(loss, *out[:3], out.log_prob if out.mean_logit is None else out.mean_logit)

    return run


def check_log_probs(tensors, entropy=False, frozen=(), op=linear_log_probs, **options):
    count = tensors["labels"].numel() * (2 if entropy else 1)
    upstream = torch.linspace(-1.5, 3.0, count)
    ours, reference = differentiable(op, entropy), differentiable(linear_log_probs_reference, entropy)
    return check(ours, reference, tensors, upstream, frozen, **options)


@pytest.fixture
def products(monkeypatch) -> list[str]:
    """The matrix products of vocabulary size, in order."""
    names, project, addmm_into = [], _linear_head.project, _linear_head.addmm_into

    def logits(x, w, out):
        names.append("logits")
        return project(x, w, out)

    def gradient(out, *args, **factors):
        names.append(f"gradient {tuple(out.shape)}")
        addmm_into(out, *args, **factors)

    monkeypatch.setattr(_linear_head, "project", logits)
    monkeypatch.setattr(_linear_head, "addmm_into", gradient)
    return names


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 16), (37, 24, 101), (3, 65, 33)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_odd_sizes(place, shape, bias, entropy):
    tensors = random_inputs(*shape, dtype=place.dtype, device=place.device, bias=bias)
    check_log_probs(tensors, entropy, mean_logits=bias)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@frozen_parts
def test_options(place, options, entropy, frozen):
    tensors = random_inputs(9, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check_log_probs(tensors, entropy, frozen, **options)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("workspace_mb", [1e-6, 0.001, None])
@frozen_parts
def test_ignored_rows_and_chunks(place, ignored, workspace_mb, frozen):
    tensors = random_inputs(7, 6, 20, dtype=place.dtype, device=place.device, ignored=ignored)
    frozen = tuple(name for name in frozen if name != "bias")
    got = check_log_probs(tensors, True, frozen, workspace_mb=workspace_mb)
    skipped = tensors["labels"] == -100
    for name in got.keys() - {"loss", "d_weight"}:
        assert not got[name][skipped].any(), f"{name} of ignored rows must be 0"


@frozen_parts
def test_a_head_that_is_padded(place, frozen):
    tensors = random_inputs(9, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    tensors["labels"] = tensors["labels"].clamp(max=28)
    got = check_log_probs(tensors, True, frozen, vocab_size=29, mean_logits=True)
    for name in {"weight", "bias"} - set(frozen):
        assert not got[f"d_{name}"][29:].any() and got[f"d_{name}"][:29].any()


@pytest.mark.parametrize("n, ignored", [(5, 1.0), (0, 0.0), (1, 0.0)], ids=["all ignored", "empty", "one"])
@frozen_parts
def test_few_rows(fp32, n, ignored, frozen):
    tensors = random_inputs(n, 6, 21, device=fp32.device, bias=True, ignored=ignored)
    for entropy in (False, True):
        check_log_probs(tensors, entropy, frozen, mean_logits=True)


def test_rows_without_ignored_labels_need_no_selection(fp32, monkeypatch):
    tensors = random_inputs(6, 6, 21, device=fp32.device, bias=True)
    expected = check_log_probs(tensors, True)
    monkeypatch.setattr(file, "selected_rows", None)
    for name, x in check_log_probs(tensors, True, ignore_index=None).items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0)


def test_rows_selected_earlier(fp32):
    tensors = random_inputs(6, 6, 21, device=fp32.device)
    tensors["labels"][2:5] = 7
    expected = check_log_probs(tensors, True, ignore_index=7)
    rows = RowSelection(tensors["labels"], ignore_index=7)
    got = evaluate(differentiable(linear_log_probs, True), tensors, torch.linspace(-1.5, 3, 12), rows=rows)
    for name, x in got.items():
        torch.testing.assert_close(x, expected[name])
    with pytest.raises(ValueError, match="give one of them"):
        linear_log_probs(**tensors, rows=rows, ignore_index=None)


def test_any_layout(place):
    tensors = random_inputs(9, 6, 21, dtype=place.dtype, device=place.device)
    tensors["hidden"] = tensors["hidden"].repeat(1, 2)[:, 6:]
    tensors["weight"] = tensors["weight"].t().contiguous().t()
    for frozen in ((), ("weight",)):
        check_log_probs(tensors, True, frozen)
        check_log_probs(tensors, False, frozen)


@frozen_parts
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_gradcheck(monkeypatch, entropy, frozen):
    set_path(monkeypatch, "torch")
    tensors = random_inputs(4, 3, 7, dtype=torch.float64, bias=True, ignored=0.3)
    labels = tensors.pop("labels")
    leaves = [x.requires_grad_(name not in frozen) for name, x in tensors.items()]

    def values(hidden, weight, bias):
        out = linear_log_probs(hidden, weight, labels, bias=bias, temperature=1.3, softcap=4.0)
        return out[:2] if entropy else out.log_prob

    assert torch.autograd.gradcheck(values, leaves)


def test_a_frozen_head_takes_two_products_and_a_trained_one_four(fp32, products):
    tensors = random_inputs(9, 6, 20, device=fp32.device)
    run = differentiable(linear_log_probs, False)
    evaluate(run, tensors, frozen=("weight",))
    assert products == ["logits", "gradient (9, 6)"]
    products.clear()
    evaluate(run, tensors)
    assert products == ["logits", "logits", "gradient (20, 6)", "gradient (9, 6)"]
    products.clear()
    with torch.no_grad():
        linear_log_probs(**tensors)
    assert products == ["logits"]


@frozen_parts
def test_backward_twice(fp32, frozen):
    tensors = random_inputs(5, 6, 21, device=fp32.device)
    leaves = {k: x.requires_grad_(k not in frozen) for k, x in tensors.items() if k != "labels"}
    out = linear_log_probs(**tensors)
    trained = [x for x in leaves.values() if x.requires_grad]
    first = torch.autograd.grad(out.log_prob.square().sum(), trained, retain_graph=True)
    again = torch.autograd.grad(out.log_prob.square().sum(), trained, retain_graph=True)
    doubled = torch.autograd.grad((2 * out.log_prob.square()).sum(), trained)
    for a, b, c in zip(first, again, doubled, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(2 * a, c)


def test_second_derivatives_are_refused(fp32):
    tensors = random_inputs(5, 6, 21, device=fp32.device)
    tensors["hidden"].requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(linear_log_probs(**tensors).log_prob.sum(), tensors["hidden"], create_graph=True)


def test_adapters_on_the_head(fp32):
    tensors = random_inputs(9, 6, 21, device=fp32.device, ignored=0.3)
    generator = torch.Generator().manual_seed(5)
    tensors["a"], tensors["b"] = (
        torch.randn(*shape, generator=generator).to(fp32.device) for shape in ((4, 6), (21, 4))
    )

    def adapted(op):
        return lambda *, a, b, **rest: op(**rest, lora=Lora(a, b, 0.5))

    runs = [differentiable(adapted(op), True) for op in (linear_log_probs, linear_log_probs_reference)]
    leaves = ("hidden", "weight", "a", "b")
    for frozen in ((), ("weight",)):
        check(*runs, tensors, torch.linspace(-1, 2, 18), frozen, leaves)


def test_under_autocast(fp32):
    tensors = random_inputs(9, 6, 21, device=fp32.device)
    upstream = torch.linspace(-1, 2, 18)
    runs = [
        under_autocast(differentiable(op, True), torch.float16) for op in (linear_log_probs, linear_log_probs_reference)
    ]
    got, plain = (evaluate(run, tensors, upstream) for run in runs)
    for name, x in plain.items():
        assert name[:2] != "d_" or got[name].dtype == x.dtype, name
        torch.testing.assert_close(got[name].to(x.dtype), x, rtol=0.02, atol=0.02)


def test_small_upstream_gradients_in_fp16(fp32):
    """A mean over many tokens gives gradients below fp16's smallest number; their sum is not."""
    tensors = {k: x.half() if k != "labels" else x for k, x in random_inputs(40, 6, 21, device=fp32.device).items()}
    double = {k: x.double() if k != "labels" else x for k, x in tensors.items()}
    upstream = torch.full((80,), 3e-8)
    got = evaluate(differentiable(linear_log_probs, True), tensors, upstream, frozen=("hidden",))["d_weight"]
    truth = evaluate(differentiable(linear_log_probs_reference, True), double, upstream, frozen=("hidden",))
    torch.testing.assert_close(got.double(), truth["d_weight"], rtol=0.02, atol=1.2e-7)
    assert got.any()


def test_extreme_and_ruled_out_logits(fp32):
    hidden = torch.tensor([[1.0], [-1.0]], device=fp32.device)
    weight = torch.tensor([[1e4], [-1e4], [0.0], [5e3], [1.0]], device=fp32.device)
    for labels in ([0, 1], [1, 0]):
        check_log_probs({"hidden": hidden, "weight": weight, "labels": torch.tensor(labels, device=fp32.device)}, True)
    bias = torch.zeros(5, device=fp32.device)
    bias[2] = -torch.inf
    tensors = {"hidden": hidden * 1e-4, "weight": weight, "labels": torch.tensor([0, 3], device=fp32.device)}
    got = evaluate(differentiable(linear_log_probs, True), {**tensors, "bias": bias}, torch.ones(4))
    kept = torch.tensor([0, 1, 3, 4], device=fp32.device)
    without = {**tensors, "weight": weight[kept], "labels": torch.tensor([0, 2], device=fp32.device)}
    expected = evaluate(differentiable(linear_log_probs_reference, True), without, torch.ones(4))
    for name in ("log_prob", "entropy", "d_hidden"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["trained", "frozen head"])
def test_values_and_gradients_agree_with_cross_entropy(fp32, frozen):
    tensors = random_inputs(9, 6, 21, device=fp32.device, ignored=0.3)
    upstream = torch.linspace(-1, 2, 9)
    got = evaluate(differentiable(linear_log_probs, False), tensors, upstream, frozen, temperature=1.3)
    want = evaluate(linear_cross_entropy, tensors, upstream, frozen, temperature=1.3, recompute=True, reduction="none")
    for name in ("log_prob", "entropy", "is_top1"):
        torch.testing.assert_close(got[name], want[name])
    for name in (name for name in want if name[:2] == "d_"):
        torch.testing.assert_close(got[name], -want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["trained", "frozen head"])
def test_compiled_whole(fp32, frozen):
    tensors = random_inputs(9, 6, 21, device=fp32.device, ignored=0.3)
    options = {"temperature": 1.3, "softcap": 5.0, "mean_logits": True}
    compiled = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")
    expected = check_log_probs(tensors, True, frozen, **options)
    for name, x in check_log_probs(tensors, True, frozen, compiled, **options).items():
        torch.testing.assert_close(x, expected[name])


def test_logits_of_a_chunk_alone_exist(fp32, monkeypatch):
    seen, workspace = [], _linear_loss.workspace

    def spy(rows, vocab, *args):
        seen.append((rows, vocab))
        return workspace(rows, vocab, *args)

    monkeypatch.setattr(_linear_loss, "workspace", spy)
    tensors = random_inputs(33, 6, 64, device=fp32.device)
    check_log_probs(tensors, True, workspace_mb=4 * 64 * 4 / 2**20)
    assert seen and all(shape == (4, 64) for shape in seen)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(4, 5)}, r"share H: hidden is \(4, 5\), weight is \(20, 6\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"one per row of hidden: labels is \(3,\), hidden \(4, 6\)"),
        ({"labels": torch.zeros(4)}, "labels must be int64"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"softcap": -1.0}, "softcap must be positive or None, got -1.0"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**{**random_inputs(4, 6, 20), **change})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(515, 129, 32003), (2100, 64, 1000)], ids=str)
def test_on_gpu(shape, dtype):
    tensors = random_inputs(*shape, dtype=dtype, device="cuda", bias=True, ignored=0.3)
    for frozen in ((), ("weight", "bias")):
        for entropy in (False, True):
            check_log_probs(tensors, entropy, frozen, temperature=1.3, mean_logits=True, workspace_mb=16)


@pytest.mark.gpu
def test_the_host_never_waits_on_gpu():
    tensors = {
        k: x.requires_grad_(x.is_floating_point()) for k, x in random_inputs(600, 64, 1000, device="cuda").items()
    }
    for mode in ("default", "error"):  # the first launches compile
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for weight in (tensors["weight"], tensors["weight"].detach()):
                inputs = {**tensors, "weight": weight}
                values = linear_log_probs(**inputs, ignore_index=None, mean_logits=True, workspace_mb=1)
                (values.log_prob.square() + values.entropy).sum().backward()
                linear_log_probs(**inputs, ignore_index=None).log_prob.square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
