"""What is of linear_cross_entropy: torch's loss, DFT, rounding far from zero, and where its recomputed logits lie."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import check_cross_entropy, double, evaluate, random_inputs, set_path
from small_blocks import home

from liger_trainer.kernels import _linear_head
from liger_trainer.kernels import linear_cross_entropy as linear_cross_entropy_file
from liger_trainer.kernels.linear_cross_entropy import Lora, linear_cross_entropy, linear_cross_entropy_reference

ALL = {"scale": 1.7, "softcap": 6.0, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 0.02, "dft": True,
       "num_items": 7}  # fmt: skip


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


def test_logits_far_from_zero(fp32, monkeypatch):
    """What log-sum-exp is rounded by is common to a row, and must not add up in the gradient of hidden."""
    monkeypatch.setattr(home("_cross_entropy_rows", "BLOCK"), "BLOCK", 128)
    tensors = random_inputs(16, 16, 300, device=fp32.device, spread=1.0)
    tensors["bias"] = torch.full((300,), 300.0, device=fp32.device)
    truth = evaluate(linear_cross_entropy_reference, double(tensors))["d_hidden"]
    errors = [
        (evaluate(op, tensors)["d_hidden"].double() - truth).norm()
        for op in (linear_cross_entropy, linear_cross_entropy_reference)
    ]
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("n, v", [(20, 83), (7, 3)])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("options", [{"reduction": "none"}, ALL], ids=["each token", "all"])
def test_recomputed_logits_lie_in_the_gradient_of_the_weight(place, tiled, monkeypatch, n, v, ignored, options):
    tiled(place.path)
    for name, columns in (("WIDE_TILE", 8), ("LAST_TILE", 4)):
        monkeypatch.setattr(home("_linear_loss", name), name, columns)
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


@pytest.mark.parametrize("n", [1, 64, 65, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_hidden_gradients_are_rounded_in_place(monkeypatch, n, dtype):
    """In steps that begin with 64 rows: each number of them, against gradients that need no rounding in place."""
    set_path(monkeypatch, "torch")
    inputs = random_inputs(n, 3, 21, dtype=dtype)
    got, want = (evaluate(linear_cross_entropy, inputs, recompute=recompute) for recompute in (True, False))
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got["d_hidden"], want["d_hidden"], rtol=tolerance, atol=tolerance / n)


@pytest.mark.gpu
def test_recomputed_logits_take_no_memory():
    """Besides the gradients, and as much again as that of the hidden states, whose sums are in fp32."""
    inputs = random_inputs(4096, 1024, 65536, dtype=torch.bfloat16, device="cuda")
    leaves = [inputs[name].requires_grad_() for name in ("hidden", "weight")]
    for _ in range(2):  # the first time cuBLAS takes memory, too
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
    """Triton compiles again for a number that is divisible by 16: the number of labels must not be one."""
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
