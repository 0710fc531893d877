"""Where ops cannot work as usual: dtypes and sizes that none supports, short memory, a Triton that does not compile."""

import gc
import importlib.util
import warnings
from types import SimpleNamespace

import pytest
import torch
from fused_losses import random_sparse
from kernel_checks import assert_same, evaluate, random_inputs, random_pair, set_path

from liger_trainer.kernels import (
    _autograd,
    _cross_entropy_rows,
    _divergence_kernels,
    _linear_head,
    _linear_loss,
    _sparse_rows,
    _triton,
)
from liger_trainer.kernels import linear_cross_entropy as cross_entropy_module
from liger_trainer.kernels.activation_linear import activation_linear
from liger_trainer.kernels.cross_entropy import cross_entropy
from liger_trainer.kernels.gated_linear import gated_linear
from liger_trainer.kernels.gated_mlp import gated_mlp
from liger_trainer.kernels.jsd import jsd
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence
from liger_trainer.kernels.lora_linear import lora_linear
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.relu2 import relu2
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.swiglu import swiglu

LABELS = torch.tensor([1, 0])
HEADS, ANGLES = torch.ones(1, 2, 2, 4), torch.ones(1, 2, 4)
CALLS = {
    "x": [
        rms_norm,
        layer_norm,
        relu2,
        lambda x: lora_linear(x, torch.ones(3, 4)),
        lambda x: activation_linear(x, torch.ones(3, 4)),
        lambda x: gated_mlp(x, [torch.ones(6, 4), torch.ones(4, 3)]),
    ],
    "gate": [swiglu, lambda x: gated_linear(x, x, torch.ones(3, 4))],
    "logits": [lambda x: cross_entropy(x, LABELS)],
    "input": [lambda x: jsd(x, torch.ones(2, 4))],
    "hidden": [lambda x: linear_cross_entropy(x, torch.ones(3, 4), LABELS)],
    "teacher_hidden": [lambda x: linear_divergence(torch.ones(2, 4), torch.ones(3, 4), x, torch.ones(3, 4))],
    "q": [
        lambda x: rope(HEADS.to(x.dtype), HEADS, ANGLES, ANGLES),
        lambda x: qk_norm_rope(HEADS.to(x.dtype), HEADS, torch.ones(4), torch.ones(4), ANGLES, ANGLES),
    ],
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("name, op", [(name, op) for name, ops in CALLS.items() for op in ops])
def test_a_dtype_that_no_op_computes_in(name, op, dtype):
    with pytest.raises(ValueError, match=rf"^{name} must be float32, .*, got {str(dtype).removeprefix('torch.')}\.$"):
        op(torch.ones(2, 4).to(dtype))


def test_rows_that_fit_no_block():
    with pytest.raises(ValueError, match=r"x must be \(..., H\) with at most 1,048,576 columns, got \(2, 1048577\)"):
        rms_norm(torch.empty(2, 2**20 + 1, device="meta"))


@pytest.fixture
def short_memory(monkeypatch):
    """Let a workspace of more than so many rows be too large for the GPU."""
    set_path(monkeypatch, "torch")
    monkeypatch.setattr(_linear_loss, "_was_short", [])

    def limit(rows: int) -> None:
        for module in (_linear_loss, cross_entropy_module):
            monkeypatch.setattr(module, "workspace", _limited(module.workspace, rows))

    return limit


def _limited(workspace, most):
    def limited(rows, *how):
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return workspace(rows, *how)

    return limited


@pytest.mark.parametrize("op, inputs, options", [
    (linear_cross_entropy, random_inputs(300, 6, 37, bias=True, ignored=0.1), {}),
    (linear_cross_entropy, random_inputs(300, 6, 37, bias=True, ignored=0.1), {"recompute": True}),
    (linear_divergence, random_pair(300, 6, 5, 37, bias=True), {"ce_weight": 0.5}),
    (linear_divergence, random_pair(300, 6, 5, 37, bias=True), {"recompute": True}),
])  # fmt: skip
def test_short_memory_takes_fewer_rows_at_a_time(short_memory, op, inputs, options):
    expected = evaluate(op, inputs, **options)
    short_memory(100)
    with pytest.warns(UserWarning, match="memory is short: the loss takes (64|75) rows at a time instead of"):
        got = evaluate(op, inputs, **options)
    assert got.keys() == expected.keys()
    assert_same(got, expected, rtol=1.3e-6, atol=1e-5)


def test_short_memory_of_hidden_states_that_are_overwritten(short_memory):
    tensors = random_inputs(300, 6, 37)
    labels, hidden, weight = tensors["labels"], *(tensors[k].requires_grad_() for k in ("hidden", "weight"))
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).loss, (hidden, weight))
    short_memory(100)
    with pytest.warns(UserWarning, match="memory is short"):
        loss = linear_cross_entropy(hidden * 1, weight, labels, overwrite_hidden=True).loss
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected)


def test_short_memory_is_said_once_however_batches_differ(short_memory):
    short_memory(100)
    with pytest.warns(UserWarning, match="memory is short") as caught:
        for rows in (300, 290, 900):
            evaluate(linear_cross_entropy, random_inputs(rows, 6, 37))
    assert len(caught) == 1


def test_memory_for_no_chunk_at_all(short_memory):
    short_memory(31)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(linear_cross_entropy, random_inputs(300, 6, 37))


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_a_gpu_without_room_for_the_usual_workspace():
    tensors = random_inputs(4096, 64, 100_000, device="cuda", dtype=torch.bfloat16)
    expected = evaluate(linear_cross_entropy, tensors)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_allocated() + 200 * 2**20  # the gradients, and a tenth of the usual workspace
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.warns(UserWarning, match="memory is short"):
            got = evaluate(linear_cross_entropy, tensors)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(got["loss"], expected["loss"])
    torch.testing.assert_close(got["d_hidden"], expected["d_hidden"])
    torch.testing.assert_close(got["d_weight"], expected["d_weight"], rtol=2e-2, atol=1e-5)


class BrokenKernel:
    """A kernel that Triton cannot compile."""

    def __init__(self, name: str, arguments: list[str]):
        self.__name__, self.arg_names, self.tries = name, arguments, 0

    def __getitem__(self, grid):
        self.tries += 1
        raise _triton.triton.errors.TritonError("def kernel(x):\n    ^\nout of resource: shared memory")


@pytest.fixture
def broken(monkeypatch) -> dict[str, BrokenKernel]:
    """Let Triton compile none of the losses' kernels. CPU tensors stand for those of a GPU."""
    if not _triton.INSTALLED:
        pytest.skip("needs Triton's errors")
    kernels = {}
    places = [
        (_cross_entropy_rows, "_whole_rows_kernel"), (_cross_entropy_rows, "_tile_statistics_kernel"),
        (_cross_entropy_rows, "_tile_gradient_kernel"), (_divergence_kernels, "divergence_kernel"),
        (_sparse_rows, "_sparse_kernel"), (_linear_head, "_find_kernel"), (_autograd, "_rescale_kernel"),
    ]  # fmt: skip
    for module, name in places:
        kernels[name] = BrokenKernel(name, [])
        monkeypatch.setattr(module, name, kernels[name])
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    monkeypatch.setattr(_triton, "_name_of", lambda device: "a GPU")
    monkeypatch.setattr(_triton, "_not_compiled", set())
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    for cached in (_triton.kept_launch, _linear_head._launch, _autograd._rescale_launch):
        cached.cache_clear()  # launches of kernels that compile
    yield kernels
    for cached in (_triton.kept_launch, _linear_head._launch, _autograd._rescale_launch):
        cached.cache_clear()


@pytest.mark.parametrize("op, inputs, options, kernel", [
    (linear_cross_entropy, random_inputs(9, 6, 37, ignored=0.3), {}, "_whole_rows_kernel"),
    (linear_cross_entropy, random_inputs(9, 6, 37, ignored=0.3), {"recompute": True}, "_tile_gradient_kernel"),
    (linear_divergence, random_pair(9, 6, 5, 37), {"ce_weight": 0.5}, "divergence_kernel"),
    (linear_sparse_divergence, random_sparse(9, 6, 37), {"ce_weight": 0.5}, "_sparse_kernel"),
])  # fmt: skip
def test_a_loss_that_triton_cannot_compile_is_computed_by_torch(request, op, inputs, options, kernel):
    expected = evaluate(op, inputs, upstream=3.0, **options)
    broken = request.getfixturevalue("broken")
    with pytest.warns(UserWarning, match=f"cannot compile {kernel} for a GPU .TritonError: out of resource") as caught:
        got = evaluate(op, inputs, upstream=3.0, **options)
    assert len(caught) == sum(one.tries for one in broken.values())  # each kernel once
    torch.testing.assert_close(got, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(evaluate(op, inputs, upstream=3.0, **options), expected)


def test_strictly_it_is_an_error(broken, monkeypatch):
    monkeypatch.setattr(_triton, "STRICT", True)
    with pytest.raises(_triton.LaunchError, match="cannot compile _find_kernel for a GPU .*LIGER_TRAINER_STRICT is 1"):
        evaluate(linear_cross_entropy, random_inputs(9, 6, 37))


def test_a_kernel_without_a_twin_says_how_to_go_on(broken):
    kernel = BrokenKernel("a_kernel", ["x_ptr"])
    with pytest.raises(_triton.LaunchError, match="cannot compile a_kernel for a GPU .*LIGER_TRAINER_TRITON=0"):
        _triton.Launch(kernel, (1,))(torch.zeros(2))


@pytest.fixture
def probed(monkeypatch):
    """Probe a GPU whose place a CPU tensor takes; its kernel adds `step`, or fails."""
    _triton.works_on.cache_clear()
    monkeypatch.setattr(_triton, "_name_of", lambda device: "a GPU")

    def probe(step: float | Exception) -> bool:
        def launch(x, BLOCK):
            if isinstance(step, Exception):
                raise step
            x.add_(step)

        monkeypatch.setattr(_triton, "_probe_kernel", {(1,): launch})
        module = SimpleNamespace(device=lambda device: warnings.catch_warnings())
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return _triton.works_on(torch.device("cpu"))

    yield probe
    _triton.works_on.cache_clear()


def test_a_gpu_on_which_triton_works(probed):
    assert probed(1.0)


@pytest.mark.parametrize("step, reason", [
    (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler."),
    (2.0, "a kernel that adds 1 to 0 returned"),
])  # fmt: skip
def test_a_gpu_on_which_triton_fails_takes_torch_and_says_so_once(probed, step, reason):
    with pytest.warns(UserWarning, match=f"Triton does not work on a GPU .{reason}.*plain torch"):
        assert not probed(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not probed(step)


def test_strictly_a_gpu_on_which_triton_fails_is_an_error(probed, monkeypatch):
    monkeypatch.setattr(_triton, "STRICT", True)
    with pytest.raises(_triton.LaunchError, match="does not work on a GPU"):
        probed(RuntimeError("no compiler"))


@pytest.mark.parametrize(
    "name, value, flag", [("LIGER_TRAINER_TRITON", "0", "OFF"), ("LIGER_TRAINER_STRICT", "1", "STRICT")]
)
def test_the_environment_variables(monkeypatch, name, value, flag):
    spec = importlib.util.spec_from_file_location("read_again", _triton.__file__)
    for given, expected in ((value, True), ("", False)):
        monkeypatch.setenv(name, given)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert getattr(module, flag) is expected


def test_triton_can_be_switched_off(probed, monkeypatch):
    monkeypatch.setattr(_triton, "OFF", True)
    assert not probed(1.0)


@pytest.mark.gpu
def test_fp64_on_a_gpu_is_computed_in_fp64():
    x = torch.randn(3, 64, dtype=torch.float64, device="cuda", requires_grad=True)
    rms_norm(x).sum().backward()
    y = x.detach().cpu().requires_grad_()
    rms_norm(y).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=1e-13, atol=1e-13)
