import pytest
import torch
import torch.nn.functional as F
from kernel_checks import check_cross_entropy, evaluate, random_inputs, set_path

from liger_trainer.kernels import _cross_entropy_rows, _linear_head, _linear_loss
from liger_trainer.kernels import linear_cross_entropy as linear_cross_entropy_file
from liger_trainer.kernels._linear_head import RowSelection
from liger_trainer.kernels.linear_cross_entropy import Lora, linear_cross_entropy, linear_cross_entropy_reference

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 4.0},
    "temperature": {"temperature": 2.0},
    "sharp": {"temperature": 0.5},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.03},
    "dft": {"dft": True},
    "all": {
        "scale": 1.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True,
        "num_items": 7,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 16), (37, 24, 101), (3, 65, 33)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_odd_sizes(place, shape, bias):
    check_cross_entropy(random_inputs(*shape, dtype=place.dtype, device=place.device, bias=bias))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(place, options):
    tensors = random_inputs(9, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check_cross_entropy(tensors, **options)


def test_extreme_logits(place):
    """Logits of +-1e4: no overflow, and the exact limits, loss 0 or the gap."""
    hidden = torch.tensor([[1.0], [-1.0]], dtype=place.dtype, device=place.device)
    weight = torch.tensor([[1e4], [-1e4], [0.0], [5e3], [1.0]], dtype=place.dtype, device=place.device)
    for labels, expected in ([0, 1], 0.0), ([1, 0], 2e4):
        tensors = {"hidden": hidden, "weight": weight, "labels": torch.tensor(labels, device=place.device)}
        got = check_cross_entropy(tensors)
        assert got["loss"].item() == pytest.approx(expected, rel=1e-2)
    check_cross_entropy({**tensors, "hidden": hidden / 8}, temperature=0.5, label_smoothing=0.1, z_loss=1e-4)


def test_large_vocabulary_with_the_block_in_use(fp32, monkeypatch):
    monkeypatch.setattr(_cross_entropy_rows, "BLOCK", 4096)
    check_cross_entropy(random_inputs(2, 3, 9001, device=fp32.device, bias=True), label_smoothing=0.1, softcap=5.0)


@pytest.mark.parametrize("options", [v for k, v in OPTIONS.items() if k not in ("dft", "all")], ids=str)
def test_gradcheck(options, monkeypatch):
    """dft aside, whose weight is held constant and so has no finite difference."""
    set_path(monkeypatch, "torch")
    tensors = random_inputs(4, 3, 7, dtype=torch.float64, bias=True, ignored=0.3)
    labels = tensors.pop("labels")

    def loss(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, labels, bias=bias, **options).loss

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in tensors.values()])


def test_equals_torch(fp32):
    tensors = random_inputs(9, 6, 20, dtype=torch.float32, device=fp32.device, ignored=0.2)
    logits = tensors["hidden"] @ tensors["weight"].t()
    expected = F.cross_entropy(logits / 1.5, tensors["labels"], label_smoothing=0.1)
    torch.testing.assert_close(linear_cross_entropy(**tensors, temperature=1.5, label_smoothing=0.1).loss, expected)
    distribution = torch.distributions.Categorical(logits=logits)
    keep = tensors["labels"] != -100
    torch.testing.assert_close(linear_cross_entropy(**tensors).entropy, distribution.entropy() * keep)


def test_dft_reference_is_the_published_loss():
    """Wu et al. 2025: -sg(p) log p."""
    tensors = random_inputs(6, 5, 9, dtype=torch.float64)
    log_prob = F.linear(tensors["hidden"], tensors["weight"]).log_softmax(-1)
    log_prob = log_prob.gather(1, tensors["labels"][:, None]).squeeze(1)
    expected = -(log_prob.exp() * log_prob).mean()
    torch.testing.assert_close(linear_cross_entropy_reference(**tensors, dft=True).loss, expected)


def test_ties_count_as_top1(fp32):
    hidden = torch.ones(3, 1, device=fp32.device)
    weight = torch.tensor([[1.0], [2.0], [0.5], [2.0]], device=fp32.device)
    labels = torch.tensor([1, 3, 0], device=fp32.device)
    assert linear_cross_entropy(hidden, weight, labels).is_top1.tolist() == [True, True, False]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(4, 5)}, r"share H: hidden is \(4, 5\), weight is \(20, 6\)"),
        ({"hidden": torch.zeros(2, 2, 6)}, r"hidden is \(2, 2, 6\)"),
        ({"weight": torch.zeros(20)}, r"weight is \(20,\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"one per row of hidden: labels is \(3,\), hidden \(4, 6\)"),
        ({"bias": torch.zeros(19)}, r"one per row of weight: bias is \(19,\), weight \(20, 6\)"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
        ({"num_items": 4, "rows": RowSelection(torch.zeros(4, dtype=torch.int64))}, "num_items was given twice"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**random_inputs(4, 6, 20), **change})


def test_logits_far_from_zero(fp32, monkeypatch):
    """What log-sum-exp is rounded by is common to a row, and must not add up in the gradient of hidden."""
    monkeypatch.setattr(_cross_entropy_rows, "BLOCK", 128)
    tensors = random_inputs(16, 16, 300, device=fp32.device, spread=1.0)
    tensors["bias"] = torch.full((300,), 300.0, device=fp32.device)
    double = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    truth = evaluate(linear_cross_entropy_reference, double)["d_hidden"]
    errors = [
        (evaluate(op, tensors)["d_hidden"].double() - truth).norm()
        for op in (linear_cross_entropy, linear_cross_entropy_reference)
    ]
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("n, v", [(6, 61), (100, 203), (7, 3)])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("options", [{"reduction": "none"}, OPTIONS["all"]], ids=["each token", "all"])
def test_recomputed_logits_lie_in_the_gradient_of_the_weight(place, tiled, monkeypatch, n, v, ignored, options):
    tiled(place.path)
    monkeypatch.setattr(_linear_loss, "WIDE_TILE", 8)
    monkeypatch.setattr(_linear_loss, "LAST_TILE", 4)
    memories, of_tile = [], _linear_head.HeadGradients.free_rows

    def spy(*args):
        memories.append(of_tile(*args))
        return memories[-1]

    monkeypatch.setattr(_linear_head.HeadGradients, "free_rows", spy)
    inputs = random_inputs(n, 8, v, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    for frozen in (), ("hidden",), ("bias",):
        check_cross_entropy(inputs, 3.0, recompute=True, frozen=frozen, **options)
        inside = [memory is not None for memory in memories]
        assert inside[-1] is False and any(inside) == (v > 3)
        memories.clear()
    check_cross_entropy(inputs, 3.0, recompute=True, frozen=("weight",), **options)
    check_cross_entropy(inputs, 3.0, recompute=True, workspace_mb=1e-4, **options)
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((2, 8), (v, 2)))
    lora = Lora(a.to(inputs["hidden"]), b.to(inputs["hidden"]), 0.5)
    check_cross_entropy(inputs, 3.0, recompute=True, lora=lora, **options)
    assert not memories


@pytest.mark.parametrize("hidden, weight", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_recomputed_logits_of_a_weight_in_another_dtype(monkeypatch, hidden, weight):
    set_path(monkeypatch, "torch")
    inputs = random_inputs(7, 7, 101)
    inputs |= {"hidden": inputs["hidden"].to(hidden), "weight": inputs["weight"].to(weight)}
    got = evaluate(linear_cross_entropy, inputs, recompute=True)
    for name, x in evaluate(linear_cross_entropy, inputs).items():
        torch.testing.assert_close(got[name], x, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("n", [0, 1, 64, 65, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_in_place(n, dtype):
    sums = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    want = sums.to(dtype)
    assert torch.equal(_linear_head._rounded_in_place(sums, dtype), want)


@pytest.mark.gpu
def test_recomputed_logits_take_no_memory():
    """Beside the gradients, and as much again as that of the hidden states, whose sums are in fp32."""
    inputs = random_inputs(4096, 1024, 65536, dtype=torch.bfloat16, device="cuda")
    leaves = [inputs[name].requires_grad_() for name in ("hidden", "weight")]
    for _ in range(2):  # the first time cuBLAS takes memory of its own
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(**inputs, recompute=True).loss.backward()
        taken = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (leaves[1].numel() + 2 * leaves[0].numel())
    assert gradients <= taken < gradients + 6 * 2**20  # a last tile of 2,048 x 1,024 takes 4


@pytest.mark.parametrize("recompute", [False, True])
def test_any_number_of_labels_takes_one_compiled_kernel(monkeypatch, recompute):
    """Triton compiles anew for a number that is divisible by 16: that of the labels must not be among them."""
    set_path(monkeypatch, "torch")
    seen = set()

    def spied(name, place):
        launch = getattr(linear_cross_entropy_file, name)

        def spy(*args):
            seen.add(args[place].stride(0))
            return launch(*args)

        monkeypatch.setattr(linear_cross_entropy_file, name, spy)

    spied("whole_rows", 3)
    spied("tile_statistics", 2)
    for labelled in (1, 15, 16, 17, 33):
        inputs = random_inputs(40, 6, 37)
        inputs["labels"][labelled:] = -100
        evaluate(linear_cross_entropy, inputs, recompute=recompute)
    assert seen and all(stride % 16 == 0 for stride in seen)
