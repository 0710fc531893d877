"""Low-rank adapters on the head of the fused linear losses: loss and every gradient against fp64."""

import functools
from collections.abc import Callable

import pytest
import torch
from fused_losses import EVERY, LOSSES, Loss
from kernel_checks import LEAVES, PATHS, Place, assert_same, check, double, evaluate, set_path
from torch import Tensor

from liger_trainer.kernels._linear_head import LinearHead, Rows, linear_reference
from liger_trainer.kernels.types import Lora, RowSelection

TINY = 1e-4  # MiB: chunks of few rows, and tiles where logits are recomputed, see `tiled`
SEED = 3
ADAPTERS = ("a0", "b0", "a1", "b1")


# The row kernels only see logits, so one dtype of theirs is enough here.
PLACES = [("torch", dtype) for dtype in PATHS["torch"]] + [(path, torch.float32) for path in PATHS if path == "triton"]


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def place(request, monkeypatch) -> Place:
    path, dtype = request.param
    return Place(path, set_path(monkeypatch, path), dtype)


def rows_for(dtype: torch.dtype) -> int:
    """So many that the largest of our roundings and of plain torch's, which differ, are of one size."""
    return 7 if dtype.itemsize > 2 else 150


NAMES = ["cross_entropy", "divergence", "sparse", "log_probs", "entropy", "alm"]


@pytest.fixture(params=NAMES[:3])
def loss(request) -> Loss:
    return LOSSES[request.param]


@pytest.fixture
def on_torch(monkeypatch) -> None:
    """The row kernels' torch twins, where only the products are at stake."""
    set_path(monkeypatch, "torch")


def adapted(loss: Loss, *shape: int, ranks=(3,), adapter_dtype=None, **how) -> dict[str, Tensor]:
    """Inputs of a loss, with adapters that matter to it."""
    tensors = loss.inputs(*shape, **how)
    generator = torch.Generator().manual_seed(SEED)
    (v, h), like = tensors["weight"].shape, tensors["weight"]
    for i, r in enumerate(ranks):
        a, b = torch.randn(r, h, generator=generator) / r**0.5, torch.randn(v, r, generator=generator)
        tensors[f"a{i}"], tensors[f"b{i}"] = (x.to(like.device, adapter_dtype or like.dtype) for x in (a, b / 2))
    return tensors


def with_adapters(op: Callable, scalings=(0.5,), dropout: float = 0.0) -> Callable:
    """The op, with adapters as arguments a0, b0, a1, b1. A single one is given as it is."""

    def run(**tensors):
        pairs = [(tensors.pop(f"a{i}"), tensors.pop(f"b{i}")) for i in range(len(scalings))]
        adapters = [Lora(a, b, scaling, dropout) for (a, b), scaling in zip(pairs, scalings, strict=True)]
        return op(**tensors, lora=adapters[0] if len(adapters) == 1 else adapters)

    return run


def leaves_of(tensors) -> tuple[str, ...]:
    return tuple(k for k in (*LEAVES, *ADAPTERS) if k in tensors)


def check_adapted(loss: Loss, tensors, upstream: float | Tensor = 1.0, scalings=(0.5,), frozen=(), **options) -> dict:
    op, reference = (with_adapters(f, scalings) for f in (loss.op, loss.reference))
    return check(op, reference, tensors, upstream, frozen, leaves_of(tensors), **options)


@pytest.mark.parametrize("loss", [EVERY[name] for name in NAMES], ids=NAMES)
@pytest.mark.parametrize("ranks, scalings", [((3,), (0.5,)), ((1, 4), (0.3, 1.7))], ids=["one", "two"])
def test_loss_and_every_gradient(place, loss, ranks, scalings):
    n, how = rows_for(place.dtype), {"dtype": place.dtype, "device": place.device, "bias": True, "ignored": 0.3}
    tensors = adapted(loss, n, 6, 21, ranks=ranks, **how)
    options = {"workspace_mb": 1e-3 if len(ranks) == 1 else None} | ({"ce_weight": 0.3} if loss is EVERY["alm"] else {})
    got = check_adapted(loss, tensors, loss.upstream(n), scalings, **options)
    assert all(got[f"d_{name}"].any() for name in leaves_of(tensors))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_options(on_torch, loss, dtype):
    tensors = adapted(loss, rows_for(dtype), 6, 21, ranks=(3, 2), dtype=dtype, bias=True, ignored=0.2)
    tensors["token_weight"] = torch.linspace(0.0, 2.0, rows_for(dtype))
    check_adapted(loss, tensors, scalings=(0.5, 0.2), workspace_mb=1e-3, num_items=11, **loss.options)


@pytest.mark.parametrize("reduction, workspace_mb", [("mean", None), ("none", TINY)])
@pytest.mark.parametrize("ranks", [(3, 2), (2, 8)], ids=["", "wide"])
def test_recomputed(place, loss, reduction, workspace_mb, ranks, tiled):
    tiled(place.path)
    n, how = rows_for(place.dtype), {"dtype": place.dtype, "device": place.device, "bias": True, "ignored": 0.3}
    tensors = adapted(loss, n, 6, 13, ranks=ranks, **how)
    upstream = torch.linspace(-1.5, 3.0, n) if reduction == "none" else 3.0
    options = {"workspace_mb": workspace_mb, "recompute": True, "reduction": reduction, **loss.options}
    check_adapted(loss, tensors, upstream, scalings=(0.5, 0.2), **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "frozen",
    [("weight", "bias"), ("weight", "bias", "a0"), ("weight", "bias", "b0"), ("a0", "b0"), ("hidden", "weight")],
)
def test_what_is_frozen_costs_no_product(on_torch, loss, frozen, recompute, products):
    tensors = adapted(loss, 5, 6, 20, bias=True)
    check_adapted(loss, tensors, frozen=frozen, recompute=recompute)
    gradients = {"weight": (20, 6), "b0": (20, 3), "hidden": (5, 6)}
    low = (5, 3)  # made from hidden and a0, either of which may need its gradient
    expected = [shape for name, shape in gradients.items() if name not in frozen]
    expected += [low] * (not {"hidden", "a0"} <= set(frozen))
    logits = [(5, 20)] * (1 + recompute)
    assert sorted(products.of("gradient")) == sorted(expected + logits)


def test_without_gradients_only_the_forward_runs(on_torch, loss, products):
    tensors = adapted(loss, 5, 6, 20)
    truth = with_adapters(loss.reference)(**tensors)
    got = with_adapters(loss.op)(**tensors)
    assert products.of("gradient") == [(5, 20)] and not got.loss.requires_grad
    torch.testing.assert_close(got.loss, truth.loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_are_closer_to_the_truth_than_plain_torch(dtype):
    """A product rounded once, and the scaling not at all."""
    tensors = adapted(LOSSES["cross_entropy"], 500, 64, 200, ranks=(1, 8), dtype=dtype)
    lora = [Lora(tensors[f"a{i}"], tensors[f"b{i}"], scaling) for i, scaling in enumerate((0.3, 1.7))]
    hidden, weight = tensors["hidden"], tensors["weight"]
    operands = LinearHead.of(hidden, weight, None, lora).operands(Rows(None, 500, 500), 200)
    got, plain = operands.logits(torch.empty(500, 200, dtype=dtype)), linear_reference(hidden, weight, lora)
    wide = [Lora(x.a.double(), x.b.double(), x.scaling) for x in lora]
    truth = linear_reference(hidden.double(), weight.double(), wide)
    wrong, allowed = ((x.double() - truth).norm() for x in (got, plain))
    assert wrong < 0.85 * allowed


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("base, adapter", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_adapters_in_another_dtype(products, on_torch, loss, base, adapter, recompute):
    """Products in the base's, as under autocast; gradients in the adapters' own."""
    base, adapter = getattr(torch, base), getattr(torch, adapter)
    tensors = adapted(loss, 33, 6, 21, ranks=(3, 2), dtype=base, adapter_dtype=adapter, ignored=0.2)
    same = {k: x.to(base) if k in ADAPTERS else x for k, x in tensors.items()}
    leaves, scalings, how = leaves_of(tensors), (0.5, 0.3), {"workspace_mb": TINY, "recompute": recompute}
    got = evaluate(with_adapters(loss.op, scalings), tensors, leaves=leaves, **how)
    plain = evaluate(with_adapters(loss.reference, scalings), same, leaves=leaves)
    truth = evaluate(with_adapters(loss.reference, scalings), double(tensors), leaves=leaves)
    assert products.dtypes == {base}
    for name in leaves:
        assert got[f"d_{name}"].dtype == tensors[name].dtype
        wrong, allowed = ((x[f"d_{name}"].double() - truth[f"d_{name}"]).norm() for x in (got, plain))
        floor = 4 * max(torch.finfo(dtype).eps for dtype in (base, adapter))
        assert wrong <= 2 * allowed + floor * truth[f"d_{name}"].norm(), f"d_{name}: {wrong:.1e}, plain {allowed:.1e}"
    torch.testing.assert_close(got["loss"].double(), truth["loss"], rtol=2e-2, atol=0)


def test_autocast_computes_in_its_dtype(products, on_torch, loss):
    tensors = adapted(loss, 9, 16, 50, ignored=0.2)
    with torch.autocast("cpu", torch.bfloat16):
        got = evaluate(with_adapters(loss.op), tensors, leaves=leaves_of(tensors))
    truth = evaluate(with_adapters(loss.reference), tensors, leaves=leaves_of(tensors))
    assert products.dtypes == {torch.bfloat16}
    for name in ("a0", "b0"):
        assert got[f"d_{name}"].dtype == torch.float32
        torch.testing.assert_close(got[f"d_{name}"], truth[f"d_{name}"], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_only_on_the_way_to_the_adapters(on_torch, loss, recompute):
    """The masks are drawn as by the reference: one for each adapter, over all rows."""
    tensors = adapted(loss, 9, 6, 21, ranks=(3, 2), bias=True, ignored=0.3)
    scalings, leaves, results = (0.5, 0.3), leaves_of(tensors), []
    for op, how in ((loss.op, {"recompute": recompute}), (loss.reference, {})):
        torch.manual_seed(5)
        results.append(evaluate(with_adapters(op, scalings, dropout=0.4), tensors, leaves=leaves, **how))
    without = evaluate(with_adapters(loss.op, scalings), tensors, leaves=leaves)
    assert_same(*results, rtol=1e-4, atol=1e-5)
    assert abs(without["loss"] - results[0]["loss"]) > 1e-3


@pytest.mark.parametrize("frozen, dropout", [(("a0",), 0.0), ((), 0.4)], ids=["a frozen", "dropout"])
def test_overwritten_hidden_states(on_torch, loss, frozen, dropout):
    tensors = adapted(loss, 9, 6, 21, ignored=0.3)
    results, op = [], with_adapters(loss.op, dropout=dropout)
    for overwrite in (False, True):
        torch.manual_seed(5)
        leaves = {k: tensors[k].clone().requires_grad_() for k in leaves_of(tensors) if k not in frozen}
        hidden = leaves["hidden"] * 1
        values = op(**tensors | leaves | {"hidden": hidden}, overwrite_hidden=overwrite, workspace_mb=TINY)
        results.append(torch.autograd.grad(values.loss, list(leaves.values())))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_hidden_states_that_an_adapter_needs_are_not_overwritten(loss):
    tensors = adapted(loss, 4, 6, 20)
    tensors["a0"].requires_grad_()
    hidden = tensors.pop("hidden").requires_grad_() * 1
    with pytest.raises(ValueError, match="overwrite_hidden would overwrite what the gradient of lora's a needs"):
        with_adapters(loss.op)(**tensors, hidden=hidden, overwrite_hidden=True)


@pytest.mark.parametrize("name", ["divergence", "sparse"])
@pytest.mark.parametrize("recompute", [False, True])
def test_words_beyond_the_shared_vocabulary_take_no_part(on_torch, name, recompute):
    tensors = adapted(LOSSES[name], 5, 6, 20, bias=True)
    if name == "sparse":
        tensors["ids"], tensors["labels"] = tensors["ids"] % 4 + 4 * torch.arange(4), tensors["labels"] % 17
    else:
        tensors["labels"] = tensors["labels"] % 17
    got = check_adapted(LOSSES[name], tensors, vocab_size=17, recompute=recompute)
    assert not got["d_b0"][17:].any() and not got["d_weight"][17:].any() and got["d_b0"][:17].any()


@pytest.mark.parametrize("dtype, logits_dtype", [("float64", None), ("bfloat16", None), ("bfloat16", torch.float32)])
def test_adapters_of_the_teacher(on_torch, dtype, logits_dtype):
    """The same as a teacher whose weight holds them. No gradient goes there."""
    loss = LOSSES["divergence"]
    tensors = adapted(loss, 7, 6, 21, dtype=getattr(torch, dtype), bias=True, ignored=0.3)
    v, h = tensors["teacher_weight"].shape
    generator = torch.Generator().manual_seed(8)
    a = torch.randn(2, h, generator=generator).to(tensors["hidden"]).requires_grad_()
    b = torch.randn(v, 2, generator=generator).to(tensors["hidden"]).requires_grad_()
    lora = Lora(a, b, 0.5)
    op = functools.partial(with_adapters(loss.op), teacher_lora=lora, logits_dtype=logits_dtype)
    got = evaluate(op, tensors, leaves=leaves_of(tensors))
    reference = functools.partial(with_adapters(loss.reference), teacher_lora=lora)
    plain, exact = evaluate(reference, tensors, leaves=leaves_of(tensors)), double(tensors)
    exact["teacher_weight"] = exact["teacher_weight"] + 0.5 * (b.double() @ a.double()).detach()
    truth = evaluate(with_adapters(loss.reference), exact, leaves=leaves_of(tensors))
    for name in ("loss", *(f"d_{k}" for k in leaves_of(tensors))):
        wrong, allowed = ((x[name].double() - truth[name]).norm() for x in (got, plain))
        floor = 8 * torch.finfo(getattr(torch, dtype)).eps
        assert wrong <= 2 * allowed + floor * truth[name].norm(), f"{name}: {wrong:.1e}, plain torch {allowed:.1e}"
    assert a.grad is None and b.grad is None


def test_second_backward(on_torch, loss):
    tensors = adapted(loss, 5, 6, 20)
    leaves = [tensors[k].requires_grad_() for k in leaves_of(tensors)]
    truth = torch.autograd.grad(with_adapters(loss.reference)(**tensors).loss, leaves)
    value = with_adapters(loss.op)(**tensors).loss
    for factor in (1, 3, 0.5):
        got = torch.autograd.grad(value, leaves, torch.full_like(value, factor), retain_graph=True)
        for g, t in zip(got, truth, strict=True):
            torch.testing.assert_close(g, factor * t)


@pytest.mark.parametrize(
    "name, frozen",
    [
        ("cross_entropy", ("weight", "bias")),
        *(pytest.param(name, (), marks=pytest.mark.slow) for name in ("divergence", "sparse")),
    ],
)
def test_compiles_as_one_graph(on_torch, name, frozen):
    loss = LOSSES[name]
    tensors = adapted(loss, 9, 6, 21, ranks=(3, 2), bias=True, ignored=0.3)
    op, leaves = with_adapters(loss.op, (0.5, 0.3)), leaves_of(tensors)
    torch.compiler.reset()
    compiled = torch.compile(lambda **k: op(**k), fullgraph=True, backend="aot_eager")
    expected = evaluate(op, tensors, 2.0, frozen, leaves)
    assert_same(evaluate(compiled, tensors, 2.0, frozen, leaves), expected, rtol=1.3e-6, atol=1e-5)


A, B = torch.zeros(2, 6), torch.zeros(20, 2)


@pytest.mark.parametrize(
    "lora, message",
    [
        (Lora(torch.zeros(2, 5), B), r"Adapter 0 of lora must have a \(r, H\) .* a is \(2, 5\), b \(20, 2\), weight"),
        (Lora(A, torch.zeros(19, 2)), r"b \(19, 2\), weight \(20, 6\)"),
        ([Lora(A, B), Lora(A, torch.zeros(20, 3))], r"Adapter 1 of lora"),
        (Lora(A[0], B), r"a is \(6,\)"),
        ((A, B, 1.0), "lora must be a Lora or a sequence of them, got Tensor"),
    ],
)
def test_bad_arguments(loss, lora, message):
    with pytest.raises(ValueError, match=message):
        loss.op(**loss.inputs(4, 6, 20), lora=lora)
    if loss.takes("teacher_lora"):
        with pytest.raises(ValueError, match="teacher_lora"):
            loss.op(**loss.inputs(4, 6, 20), teacher_lora=lora)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ON_GPU = [("cross_entropy", rank, dtype, ("weight",), {"recompute": recompute, "workspace_mb": 16})
          for rank in (16, 3) for recompute in (False, True) for dtype in DTYPES]  # fmt: skip
ON_GPU += [("divergence", 16, torch.bfloat16, (), {"logits_dtype": dtype, "workspace_mb": 32})
           for dtype in (None, torch.float32)]  # fmt: skip


def adapted_on_gpu(name: str, rank: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return adapted(LOSSES[name], 1000, 576, 32003, ranks=(rank,), dtype=dtype, device="cuda", ignored=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("name, rank, dtype, frozen, options", ON_GPU, ids=str)
def test_loss_and_every_gradient_on_gpu(name, rank, dtype, frozen, options):
    check_adapted(LOSSES[name], adapted_on_gpu(name, rank, dtype), 3.0, (0.7,), frozen, **options)


@pytest.mark.gpu
def test_host_never_waits_on_gpu():
    tensors = adapted_on_gpu("cross_entropy", 16)
    for name in ("a0", "b0"):  # as PEFT keeps them
        tensors[name] = tensors[name].float().requires_grad_()
    tensors["hidden"].requires_grad_()
    for mode in ("default", "error"):  # compiled in the first round
        num_items = torch.tensor(300, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rows = RowSelection(tensors["labels"], num_items)
            with_adapters(LOSSES["cross_entropy"].op)(**tensors, rows=rows).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert tensors["a0"].grad.dtype == tensors["b0"].grad.dtype == torch.float32
