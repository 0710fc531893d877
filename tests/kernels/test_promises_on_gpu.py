"""What all ops promise, on a GPU: the error bound at real sizes, as shipped; no wait for the device; large offsets."""

from typing import Any

import pytest
import torch
from kernel_checks import Place, check
from op_table import CASES, Case
from torch import Tensor

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NORM = [{"rows": 2048, "hidden": 4096}, {"rows": 333, "hidden": 2560}, {"rows": 77, "hidden": 576},
        {"rows": 130, "hidden": 20000}, {"rows": 3, "hidden": 65536}]  # fmt: skip
GATED = [{"rows": 1024, "hidden": 4096, "inner": 512}, {"rows": 333, "hidden": 1501, "inner": 512}]
HEADS = [{"positions": 1024, "heads": 32, "keys": 8, "width": 128}, {"positions": 333, "heads": 14, "width": 64},
         {"positions": 999, "heads": 40, "keys": 8, "width": 96}, {"positions": 1, "width": 256}]  # fmt: skip
LORA = [
    {"rows": 2048, "hidden": 1024, "inner": 1536, "rank": 16},
    {"rows": 77, "hidden": 1000, "inner": 1500, "rank": 8},
]
GIVEN = [{"rows": 2048, "vocab": 4096}, {"rows": 333, "vocab": 50001}, {"rows": 3, "vocab": 128256}]
SIZES = {
    "rms_norm": NORM, "add_rms_norm": NORM, "layer_norm": NORM, "gated_rms_norm": [{"rows": 2048, "hidden": 8184},
    {"rows": 1001, "hidden": 1200}], "rope": HEADS, "qk_norm_rope": HEADS, "swiglu": GATED, "geglu": GATED,
    "relu2": GATED, "clamped_swiglu": GATED, "gated_linear": GATED, "activation_linear": GATED, "gated_mlp": GATED[:1],
    "linears": GATED[:1], "lora_linear": LORA, "lora_linears": LORA, "lora_mlp": LORA, "kl_div": GIVEN, "jsd": GIVEN,
    "tvd": GIVEN, "cross_entropy": GIVEN,
    "lora_experts": [  # grouped; few rows for many experts; odd ranks, which are filled up; odd sizes, one by one
        {"rows": 300, "experts": 16, "hidden": 256, "inner": 384, "rank": 16},
        {"rows": 5, "experts": 64, "hidden": 128, "inner": 64, "rank": 8},
        {"rows": 70, "hidden": 128, "inner": 64}, {"rows": 70, "hidden": 100, "inner": 60, "rank": 4},
        {"rows": 512, "experts": 16, "hidden": 256, "inner": 128, "rank": 16},
    ],
    "document_attention": [
        {"rows": 1999, "heads": 8, "keys": 2, "width": width} for width in (64, 96, 128, 256, 320, 512)
    ],
    "causal_conv": [{"rows": 1999, "hidden": hidden} for hidden in (100, 6144)],
}  # fmt: skip
OWN_SIZES = ("one column", "whole tiles", "whole blocks", "one pair", "no power of two", "OLMo2, no power of two",
             "more heads than a tile", "no token", "Phi", "interleaved Phi", "groups of a column", "odd sizes",
             "one expert", "two rows", "two columns", "one block", "many blocks", "inplace, no token")  # fmt: skip
FORMS = {name: case for name, case in CASES.items() if case.form not in OWN_SIZES}


def on_gpu(case: Case, dtype: torch.dtype, size: dict[str, int]) -> dict[str, Any]:
    tensors = case.inputs(Place("triton", "cuda", dtype), **size)
    if isinstance(tensors.get("ends"), int):
        tensors["ends"] = size["rows"]
    elif "ends" in tensors:
        tensors["ends"] = torch.tensor((0, 3, 3, 700, 800, 1200, 1999), dtype=torch.int32, device="cuda")
    return tensors


def sizes_of(case: Case, dtype: torch.dtype) -> list[dict[str, int]]:
    """An op's first form takes all sizes in each dtype. Another takes all dtypes and each size in one of them: its
    kernels depend on the form and on the size, and each pair of these takes seconds to compile."""
    sizes, turn = SIZES[case.op], DTYPES.index(dtype)
    if case.name == case.op:
        return sizes
    return sizes[turn :: len(DTYPES)] or [sizes[turn % len(sizes)]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_outputs_and_gradients_are_within_the_bound_on_gpu(case, dtype):
    if case.op == "tvd" and "logits" in case.form and dtype == torch.float32:
        pytest.skip("among millions of softmaxes some cross within rounding, and the sign there is chance")
    for size in sizes_of(case, dtype):
        tensors = on_gpu(case, dtype, size)
        check(case.function, case.reference, tensors, None, leaves=case.leaves_of(tensors), **case.options)


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_repeats_to_the_bit_and_never_waits_on_gpu(case):
    tensors = on_gpu(case, torch.bfloat16, sizes_of(case, torch.bfloat16)[-1])  # of which the kernels are compiled
    results = []
    for mode in ("default", "error"):  # the first run compiles
        torch.cuda.synchronize()
        leaves = [tensors[name].requires_grad_() for name in case.leaves_of(tensors)]
        torch.cuda.set_sync_debug_mode(mode)
        try:
            outputs = case.function(**tensors, **case.options)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            results.append([*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("name", [
    "rms_norm, cast", "add_rms_norm, all options", "layer_norm", "gated_rms_norm, gate first", "qk_norm_rope, Qwen3",
])  # fmt: skip
def test_wide_weights_on_gpu(name):
    """fp32 weights over bf16 rows."""
    case = CASES[name]
    tensors = on_gpu(case, torch.bfloat16, SIZES[case.op][-1])
    tensors |= {k: x.float() for k, x in tensors.items() if "weight" in k or k == "bias"}
    check(case.function, case.reference, tensors, None, leaves=case.leaves_of(tensors), **case.options)


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("name, columns", [
    *((name, 8192) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    ("swiglu", 4096), ("swiglu, packed", 4096), ("jsd, sum", 131072), ("jsd, logits, sum", 131072),
])  # fmt: skip
def test_offsets_beyond_32_bits_on_gpu(name, columns):
    """The last rows of tensors with more than 2^31 numbers get what they get without the others."""
    case = CASES[name]
    size = {"vocab": columns} if case.op == "jsd" else {"hidden": columns}
    tail = on_gpu(case, torch.bfloat16, {"rows": 5, **size})
    many = 2**31 // columns + 3
    large = {k: x for k, x in tail.items() if k not in case.rows}
    for k in case.rows:
        if tail.get(k) is not None:
            large[k] = torch.zeros(many, *tail[k].shape[1:], dtype=torch.bfloat16, device="cuda")
            large[k][-5:] = tail[k]
    large = {k: large.get(k) for k in tail}  # in the op's order
    assert large[case.rows[0]].numel() > 2**31

    def last(tensors: dict[str, Any]) -> list[Tensor]:
        leaves = [tensors[k].requires_grad_() for k in case.leaves_of(tensors)]
        outputs = case.function(**tensors, **case.options)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        loss = sum(y if not y.dim() else y[-5:].float().square().sum() for y in outputs)
        found = [*(y for y in outputs if y.dim()), *torch.autograd.grad(loss, leaves)]
        return [x[-5:] if x.dim() > 1 else x for x in found]

    torch.testing.assert_close(last(large), last(tail))


def test_adapters_wider_than_the_base_on_gpu():
    for name in ("lora_linear, three", "lora_linears", "lora_mlp", "lora_experts"):
        case = CASES[name]
        tensors = on_gpu(case, torch.float32, SIZES[case.op][0])
        leaves = case.leaves_of(tensors)
        narrow = {k: x.bfloat16() for k, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()
                  and (k not in leaves or k in ("x", "weights"))}  # fmt: skip
        check(case.function, case.reference, tensors | narrow, None, leaves=leaves, **case.options)
