"""How the fused linear losses compute: rows left out, counts, workspaces, frozen inputs, any layout and dtype, token
weights, recomputed logits, fp32 accumulation, gradients over the hidden states, whole graphs."""

import functools
from collections.abc import Callable

import pytest
import torch
from fused_losses import DISTINCT, LOSSES, Loss
from kernel_checks import LEAVES, assert_same, check, double, evaluate, fields, random_inputs, set_path
from small_blocks import home
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.types import RowSelection

TINY = 1e-4  # MiB: tiles of 4 columns and chunks of 2 or 4 rows, see `tiled`
MODES = {"at once": {}, "recomputed": {"recompute": True}, "each token": {"recompute": True, "reduction": "none"}}
every_loss = pytest.mark.parametrize("loss", DISTINCT.values(), ids=DISTINCT)
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
OF_EACH = {f"{name}, {mode}": (loss, how) for name, loss in DISTINCT.items() for mode, how in MODES.items()
           if loss.takes(*how)}  # fmt: skip
every_mode = pytest.mark.parametrize("loss, mode", OF_EACH.values(), ids=OF_EACH)
BOTH = {name: case for name, case in OF_EACH.items() if "reduction" not in case[1]}
every_how = pytest.mark.parametrize("loss, how", BOTH.values(), ids=BOTH)
recomputed_or_not = pytest.mark.parametrize("recompute", [False, True], ids=["at once", "recomputed"])


@pytest.fixture(params=LOSSES)
def loss(request) -> Loss:
    return LOSSES[request.param]


def each(n: int) -> Tensor:
    """A gradient for every token's loss, none of them 1."""
    return torch.linspace(-1.5, 3.0, n)


def weighted(loss: Loss, n: int, *shape: int, device="cpu", **how) -> dict[str, Tensor]:
    """Inputs with a weight for every token, one of them 0, if the loss takes it."""
    tensors = loss.inputs(n, *shape, device=device, **how)
    if not loss.takes("token_weight"):
        return tensors
    token_weight = torch.rand(n, generator=torch.Generator().manual_seed(3)) * 2
    token_weight[: n // 3] = 0
    return tensors | {"token_weight": token_weight.to(device)}


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    assert_same(got, expected, rtol=rtol, atol=atol)


def assert_nothing_of(rows: Tensor, got: dict[str, Tensor]) -> None:
    """These rows have values and gradients of 0. (The loss may have a value for each, or two.)"""
    for name in got.keys() - {"loss", "d_weight", "d_bias"}:
        assert not got[name][rows].any(), f"{name} of ignored rows must be 0"


# Rows and their number


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("workspace_mb", [1e-6, 0.001, 512])
@pytest.mark.parametrize("options", [False, True], ids=["", "all"])
@every_loss
def test_ignored_rows_and_chunks(place, loss, ignored, workspace_mb, options):
    tensors = weighted(loss, 7, 6, 20, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    how = {"workspace_mb": workspace_mb, **(loss.options if options else {})}
    got = check(loss.op, loss.reference, tensors, loss.upstream(7), **how)
    assert_nothing_of(tensors["labels"] == -100, got)


@every_loss
def test_ignored_rows_take_no_part_in_the_products(fp32, loss, products):
    tensors = loss.inputs(9, 6, 20, device=fp32.device)
    tensors["labels"][:6] = -100
    evaluate(loss.op, tensors, loss.upstream(9))
    assert products[-2:] == [("gradient", 20, 6), ("gradient", 3, 6)]


@pytest.mark.parametrize("n, ignored", [(5, 1.0), (0, 0.0), (1, 0.0)], ids=["all ignored", "empty", "one"])
@pytest.mark.parametrize("workspace_mb", [None, TINY])
@every_mode
def test_few_rows(place, loss, tiled, n, ignored, workspace_mb, mode):
    tiled(place.path)
    tensors = weighted(loss, n, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    if n == 0 and "spans" in tensors:
        pytest.skip("the reference of alm needs rows: see its own file")
    got = check(loss.op, loss.reference, tensors, 2.0, workspace_mb=workspace_mb, **mode)
    if n != 1:
        assert all(not x.any() for x in got.values())


@recomputed_or_not
def test_num_items(fp32, loss, recompute):
    tensors = loss.inputs(6, 6, 21, device=fp32.device, ignored=0.3)
    for num_items in (5, 2.5, torch.tensor(2.5, device=fp32.device), torch.tensor([1000], device=fp32.device)):
        check(loss.op, loss.reference, tensors, 3.0, recompute=recompute, num_items=num_items)


@every_how
def test_rows_selected_earlier(fp32, loss, how):
    tensors = loss.inputs(6, 6, 21, device=fp32.device)
    tensors["labels"][2:5] = 7
    if "spans" in tensors:
        tensors["spans"][2:5] = -1
    num_items = 4.5 if loss.takes("num_items") else None
    counted = {"num_items": num_items} if num_items else {}
    expected = check(loss.op, loss.reference, tensors, loss.upstream(6), ignore_index=7, **counted, **how)
    rows = RowSelection(tensors["labels"], num_items and torch.tensor(num_items), ignore_index=7)
    assert_same(evaluate(loss.op, tensors, loss.upstream(6), rows=rows, **how), expected)
    if loss.takes("recompute") and loss.op is not linear_cross_entropy:  # a mask of tokens without a target
        got = evaluate(loss.op, {k: x for k, x in tensors.items() if k != "labels"}, 3.0, rows=rows, **how)
        assert_same(got, {k: expected[k] for k in ("loss", "d_hidden", "d_weight")})


@recomputed_or_not
@pytest.mark.parametrize("through_rows", [False, True], ids=["argument", "rows"])
def test_nothing_is_divided_by_zero_items(fp32, loss, recompute, through_rows):
    """Of no row it is 0 all the same; of labelled rows the quotient would be infinite, and 0 would hide them."""
    tensors = loss.inputs(6, 6, 21, device=fp32.device, ignored=0.3)

    def run(num_items):
        given = {"rows": RowSelection(tensors["labels"], num_items)} if through_rows else {"num_items": num_items}
        return evaluate(loss.op, tensors, recompute=recompute, **given)

    labelled = int((tensors["labels"] != -100).sum())
    bad = [0, -1.0, torch.tensor(0, device=fp32.device), torch.tensor(float("nan"), device=fp32.device)]
    for num_items in bad:
        with pytest.raises(ValueError, match=rf"num_items must be positive, got \S+ for {labelled} rows"):
            run(num_items)
    tensors["labels"].fill_(-100)
    for num_items in bad[::2]:
        assert all(not x.any() for x in run(num_items).values())
        plain = evaluate(loss.reference, tensors, num_items=num_items)
        assert not plain["loss"].any() and not plain["d_hidden"].any()


@every_loss
def test_results_do_not_depend_on_the_workspace(fp32, loss, products):
    """Nor do logits of more rows exist than fit into it."""
    tensors = loss.inputs(6, 6, 37, device=fp32.device, bias=True, ignored=0.2)
    expected = evaluate(loss.op, tensors, loss.upstream(6), **loss.options)
    columns = sum(tensors[name].shape[0] for name in tensors if name.endswith("weight"))
    for rows in (1, 2, 4096):
        products.clear()
        how = {"workspace_mb": rows * 4 * columns / 2**20}
        # libraries order the sums of a product by its number of rows
        assert_near(evaluate(loss.op, tensors, loss.upstream(6), **how, **loss.options), expected, rtol=1e-5, atol=2e-6)
        assert 0 < max(n for n, _ in products.of("logits")) <= rows


# Token weights


@recomputed_or_not
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_token_weight_of_any_dtype_and_stride(fp32, loss, dtype, recompute):
    tensors = loss.inputs(6, 6, 21, device=fp32.device, ignored=0.2)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], device=fp32.device)
    expected = evaluate(loss.op, tensors | {"token_weight": mask.float()}, recompute=recompute)
    got = evaluate(loss.op, tensors | {"token_weight": mask.to(dtype)[:, None].expand(6, 3)[:, 1]}, recompute=recompute)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


@recomputed_or_not
def test_no_gradient_goes_to_the_teacher_or_to_token_weight(fp32, loss, recompute):
    tensors = weighted(loss, 4, 6, 21, device=fp32.device, bias=True)
    leaves = {k: x.requires_grad_(x.is_floating_point()) for k, x in tensors.items()}
    loss.op(**leaves, recompute=recompute).loss.backward()
    assert all((x.grad is None) == (k not in LEAVES) for k, x in leaves.items())


# Recomputed logits


@pytest.mark.parametrize("options", [False, True], ids=["", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_recompute(place, loss, tiled, products, options, reduction):
    """Over many chunks, and for the cross-entropy many tiles, with another gradient for each token's loss."""
    tiled(place.path)
    tensors = weighted(loss, 7, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    mode = {"recompute": True, "reduction": reduction, "workspace_mb": TINY, **(loss.options if options else {})}
    got = check(loss.op, loss.reference, tensors, each(7) if reduction == "none" else 3.0, **mode)
    assert got["loss"].shape == ((7,) if reduction == "none" else ())
    tiles = [shape for kind, *shape in products if kind == "logits"]
    assert len(tiles) >= 6 and max(rows for rows, _ in tiles) <= 4
    if loss is LOSSES["cross_entropy"]:
        assert max(columns for _, columns in tiles) <= 12
    skipped = tensors["labels"] == -100
    assert_nothing_of(skipped, got)
    assert not got["loss"].dim() or not got["loss"][skipped].any()


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "weight")])
@recomputed_or_not
def test_frozen_inputs_skip_their_products(fp32, loss, products, frozen, recompute):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, bias=True)
    columns = [21, 21] if loss is LOSSES["divergence"] else [21, 26] if loss is LOSSES["uld"] else [21]
    how = {"recompute": True}
    if not recompute:  # chunks of 2, 2 and 1
        how = {"workspace_mb": 2 * 4 * (24 * len(columns) + 8 * (loss is LOSSES["uld"])) / 2**20}
    check(loss.op, loss.reference, tensors, 3.0, frozen=frozen, **how)
    gradients = [("weight" not in frozen) * [("gradient", 21, 6)] + ("hidden" not in frozen) * [("gradient", n, 6)]
                 for n in ((5,) if recompute else (2, 2, 1))]  # fmt: skip
    assert [x for x in products if x[0] == "gradient"] == sum(gradients, [])
    logits = [("logits", n, v) for n in ((5, 5) if recompute else (2, 2, 1)) for v in columns]
    assert [x for x in products if x[0] == "logits"] == logits


@pytest.mark.parametrize("why", ["frozen", "no_grad"])
@every_how
def test_without_gradients_only_the_forward_runs(fp32, loss, how, products, why):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, bias=True)
    truth = loss.reference(**tensors, **loss.options)
    with torch.set_grad_enabled(why == "frozen"):
        leaves = {k: x.requires_grad_(why == "no_grad" and k in LEAVES) for k, x in tensors.items()}
        got = loss.op(**leaves, **how, **loss.options)
    assert {kind for kind, *_ in products} == {"logits"} and {rows for _, rows, _ in products} == {5}
    assert not any(x.requires_grad for x in fields(got).values())
    assert_near(fields(got), fields(truth))


@every_how
@pytest.mark.parametrize("layout", ["transposed", "columns of wider"])
def test_non_contiguous_inputs(fp32, loss, how, tiled, layout):
    tiled(fp32.path)
    tensors = weighted(loss, 5, 6, 21, device=fp32.device, bias=True, ignored=0.3)
    for name, x in tensors.items():
        if layout == "transposed":
            tensors[name] = x.t().contiguous().t() if x.dim() == 2 else torch.stack([x, x], -1)[:, 0]
            assert not tensors[name].is_contiguous()
        elif x.dim() == 2:
            tensors[name] = torch.cat([x, x], -1)[:, : x.shape[-1]]
    check(loss.op, loss.reference, tensors, loss.upstream(5), workspace_mb=TINY, **how, **loss.options)


def test_recompute_holds_nothing_but_its_inputs(fp32, loss):
    tensors = weighted(loss, 6, 6, 21, device=fp32.device, bias=True, ignored=0.3)
    inputs, saved = {x.data_ptr() for x in tensors.values()}, []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    for name in LEAVES:
        tensors[name].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss.op(**tensors, recompute=True, reduction="none")
    assert saved and all(x.data_ptr() in inputs or x.numel() <= 6 * 6 for x in saved), [x.shape for x in saved]


# Whole graphs


@every_loss
def test_compiles_as_one_graph(loss):
    tensors = weighted(loss, 7, 6, 21, bias=True, ignored=0.3)
    options = loss.options | ({"num_items": torch.tensor(7.0)} if loss.takes("num_items") else {})
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(loss.op, **options), fullgraph=True, backend="aot_eager")
    for frozen in ((), ("weight", "bias")) if loss is DISTINCT["entropy"] else ((),):
        got, expected = (
            evaluate(op, tensors, loss.upstream(7), frozen) for op in (compiled, functools.partial(loss.op, **options))
        )
        assert got.keys() == expected.keys()
        assert_near(got, expected)
    with torch.no_grad():
        assert_near(fields(compiled(**tensors)), fields(loss.op(**tensors, **options)))


@pytest.mark.parametrize("name", ["cross_entropy", "divergence"])
def test_autocast_decides_when_traced(name):
    loss = LOSSES[name]
    tensors = loss.inputs(9, 6, 21, bias=True, ignored=0.3)
    torch.compiler.reset()
    compiled = torch.compile(lambda **k: loss.op(**k), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = evaluate(compiled, tensors), evaluate(loss.op, tensors)
    assert got["d_weight"].dtype == torch.float32
    assert torch.equal(got["loss"], expected["loss"])
    assert not torch.equal(got["loss"], evaluate(loss.op, tensors)["loss"])


def test_second_derivatives_are_refused_in_a_graph_too():
    """Even where torch.compile leaves the opaque op to autograd, whose gradients hold constants."""
    tensors = random_inputs(9, 6, 21)
    hidden = tensors.pop("hidden").requires_grad_()
    torch.compiler.reset()
    loss = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)(hidden, **tensors).loss
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


NO_PLACE = [
    *((loss, {"rows": None}, "rows has no place under torch.compile") for loss in DISTINCT.values()),
    *((LOSSES[name], {how: True}, f"{how} has no place under torch.compile")
      for name in ("cross_entropy", "divergence") for how in ("recompute", "overwrite_hidden")),
    *((LOSSES[name], {cap: 0.0}, "softcap must be positive or None, got 0.0")
      for name, cap in (("cross_entropy", "softcap"), ("divergence", "softcap"), ("divergence", "teacher_softcap"))),
]  # fmt: skip


@pytest.mark.parametrize("loss, option, message", NO_PLACE)
def test_what_has_no_place_in_a_graph_is_refused(loss, option, message):
    tensors = loss.inputs(9, 6, 21)
    if "rows" in option:
        option = {"rows": RowSelection(tensors["labels"])}
    torch.compiler.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(lambda **k: loss.op(**k, **option), fullgraph=True, backend="aot_eager")(**tensors)


# Gradients


@modes
def test_second_backward(fp32, loss, mode):
    tensors = loss.inputs(4, 6, 21, device=fp32.device, bias=True, ignored=0.2)
    truth = evaluate(loss.reference, tensors, reduction=mode.get("reduction", "mean"))
    leaves = [tensors[k].requires_grad_() for k in LEAVES]
    value = loss.op(**tensors, **mode).loss
    factors = (1.0, 3.0, 0.0, 0.5)
    results = [torch.autograd.grad(value, leaves, torch.full_like(value, f), retain_graph=True) for f in factors]
    for factor, grads in zip(factors, results, strict=True):  # the earlier results must not have changed either
        assert_near(dict(zip(LEAVES, grads, strict=True)), {k: factor * truth[f"d_{k}"] for k in LEAVES})
    if value.dim() == 0:
        value.backward(retain_graph=True)
        for leaf in leaves:
            leaf.grad.mul_(10)  # what gradient clipping does
        (2 * value).backward()
        assert_near({k: tensors[k].grad for k in LEAVES}, {k: 12 * truth[f"d_{k}"] for k in LEAVES})


@every_mode
def test_gradients_of_gradients_are_refused(fp32, loss, mode):
    tensors = loss.inputs(4, 6, 21, device=fp32.device)
    hidden = tensors["hidden"].requires_grad_()
    value = loss.op(**tensors, **mode).loss.sum() + hidden.square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(value, hidden, create_graph=True)


def test_changed_inputs_are_noticed(fp32, loss):
    """The backward reads them again."""
    tensors = loss.inputs(4, 6, 21, device=fp32.device)
    hidden = tensors["hidden"].requires_grad_() * 1
    value = loss.op(**{**tensors, "hidden": hidden}, recompute=True).loss
    hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("label", [21, -1, 2**40])
def test_label_outside_the_vocabulary(fp32, tiled, label):
    """NaN, whichever tile it is missing from; on a CPU the one tile of a whole row is an error, as in torch."""
    tiled(fp32.path)
    tensors = random_inputs(5, 6, 21, device=fp32.device, bias=True)
    tensors["labels"][2] = label
    got = linear_cross_entropy(**tensors, recompute=True, reduction="none", workspace_mb=TINY)
    assert got.loss.isnan().tolist() == [False, False, True, False, False]
    if fp32.path == "torch":
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_cross_entropy(**tensors, recompute=True)
    else:
        got = linear_cross_entropy(**tensors, recompute=True)
        assert got.loss.isnan() and got.log_prob.isnan().tolist() == [False, False, True, False, False]


@every_how
def test_autocast_computes_in_its_dtype(loss, how, products, monkeypatch):
    set_path(monkeypatch, "torch")
    tensors = loss.inputs(33, 16, 50, bias=True, ignored=0.2)
    options = {name: value for name, value in loss.options.items() if name != "dft"}
    with torch.autocast("cpu", torch.bfloat16):
        got = evaluate(loss.op, tensors, loss.upstream(33), **how, **options)
        plain = evaluate(loss.reference, tensors, loss.upstream(33), **options)
    assert products.dtypes == {torch.bfloat16}
    for name, truth in evaluate(loss.reference, double(tensors), loss.upstream(33), **options).items():
        if truth.is_floating_point():
            assert got[name].dtype == torch.float32, name
            wrong, allowed = ((x[name].double() - truth).norm() for x in (got, plain))
            assert wrong <= 2 * allowed + 1e-3, f"{name}: error {wrong:.2e}, plain torch under autocast {allowed:.2e}"
            assert wrong > 0 or name == "teacher_mass"


@pytest.fixture(params=["torch", "triton"])
def fp16_path(request, tiled) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    tiled(request.param)
    return request.param


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("large", ["hidden", "weight"])
def test_fp16_gradients_do_not_underflow(loss, fp16_path, large, reduction):
    """Times 1e-6 the logits' gradients lie below fp16's smallest number; those of a product with 64 do not."""
    tensors = loss.inputs(5, 6, 21, bias=True)
    other = "weight" if large == "hidden" else "hidden"
    tensors[large], tensors[other] = tensors[large] * 64, tensors[other] / 64
    tensors = {k: x.half() if x.is_floating_point() else x for k, x in tensors.items()}
    upstream = 1e-6 * (each(5) if reduction == "none" else 5.0)
    got = evaluate(loss.op, tensors, upstream, recompute=True, reduction=reduction, workspace_mb=TINY)
    truth = evaluate(loss.reference, double(tensors), upstream, reduction=reduction)
    name = f"d_{other}"
    torch.testing.assert_close(got[name].double(), truth[name], rtol=4e-3, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fp16_sums_over_tokens_do_not_overflow(loss, fp16_path, reduction):
    """The mean's gradient lies within fp16, the sum over tokens that it is a part of does not."""
    n = 9
    tensors = loss.inputs(n, 6, 21)
    tensors["hidden"], tensors["weight"] = torch.full((n, 6), 3e4), tensors["weight"] * 1e-5
    tensors["labels"].fill_(3)
    only_ce = {"divergence": {"kind": {"forward_kl": 0.0}}, "uld": {"uld_weight": 0.0}, "sparse": {}}
    options = next(({"ce_weight": 1.0, **how} for name, how in only_ce.items() if loss is LOSSES[name]), {})
    if "log_probs" in tensors:
        tensors["log_probs"].fill_(-torch.inf)
    tensors = {k: x.half() if x.is_floating_point() else x for k, x in tensors.items()}
    upstream = 1 / n if reduction == "none" else 1.0
    got = evaluate(loss.op, tensors, upstream, recompute=True, reduction=reduction, **options)
    truth = evaluate(loss.reference, double(tensors), upstream, reduction=reduction, **options)
    assert truth["d_weight"].abs().max() * n > 65504
    torch.testing.assert_close(got["d_weight"].double(), truth["d_weight"], rtol=4e-3, atol=1.0)


# The weight's gradient summed in fp32


@pytest.mark.parametrize("recompute", [False, True])
def test_fp32_accumulation(loss, tiled, recompute, monkeypatch):
    """Rounded once and not once a chunk: less than half the error over many chunks, which are summed so by default."""
    tiled("torch")
    tensors = loss.inputs(128, 8, 40, dtype=torch.bfloat16)
    tensors["hidden"].abs_()  # sums that grow from chunk to chunk
    tensors["labels"].fill_(3)
    options = {"uld_weight": 0.0, "ce_weight": 1.0} if loss is LOSSES["uld"] else {}
    truth = evaluate(loss.reference, double(tensors), **options)
    errors = []
    for accumulate_dtype, roundings in ((None, 10**6), (torch.float32, 10**6), (None, 16)):
        monkeypatch.setattr(home("_linear_loss", "ROUNDINGS"), "ROUNDINGS", roundings)
        how = {"recompute": recompute, "accumulate_dtype": accumulate_dtype, "workspace_mb": 4 * TINY}
        got = evaluate(loss.op, tensors, **how, **options)
        assert got["d_weight"].dtype == torch.bfloat16
        errors.append((got["d_weight"].double() - truth["d_weight"]).norm())
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] == errors[1]


# The gradient of hidden over hidden


def over_a_copy(loss: Loss, layout: Callable[[Tensor], Tensor] = torch.clone, **how) -> Callable:
    """The op over a tensor that depends on hidden, which as a leaf must stay."""

    def op(hidden, *args, **values):
        return loss.op(layout(hidden), *args, overwrite_hidden=True, **how, **values)

    return op


def columns_of_wider(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[:, : x.shape[1]]


def transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format).t()


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("layout", [torch.clone, columns_of_wider, transposed])
def test_overwrite_hidden(place, loss, ignored, layout):
    tensors = weighted(loss, 5, 6, 21, dtype=place.dtype, device=place.device, bias=True, ignored=ignored)
    check(over_a_copy(loss, layout), loss.reference, tensors, 3.0, workspace_mb=0.0003)


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("overwrite", [True, False])
def test_overwrite_hidden_reuses_its_memory(fp32, loss, ignored, overwrite):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, ignored=ignored)
    hidden, seen = tensors["hidden"].requires_grad_() * 1, []
    hidden.register_hook(seen.append)
    memory, before = hidden.data_ptr(), hidden.detach().clone()
    loss.op(**{**tensors, "hidden": hidden}, overwrite_hidden=overwrite).loss.backward()
    assert (seen[0].data_ptr() == memory) == overwrite
    assert torch.equal(hidden, before) != overwrite


class Storages(TorchDispatchMode):
    """Memory of tensors of a shape, as operations return them."""

    def __init__(self, *shape: int):
        super().__init__()
        self.shape, self.seen = shape, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {x.data_ptr() for x in tree_leaves(result) if isinstance(x, Tensor) and x.shape == self.shape}
        return result


@pytest.mark.parametrize("workspace_mb", [None, TINY])
def test_the_gradient_of_gathered_rows_takes_their_memory(fp32, workspace_mb):
    """With labels of some rows there is one copy of these, not two, until they are scattered."""
    loss = LOSSES["cross_entropy"]
    tensors = loss.inputs(40, 12, 21, device=fp32.device)
    tensors["labels"][::4] = -100
    with Storages(30, 12) as storages:
        evaluate(loss.op, tensors, loss.upstream(40), workspace_mb=workspace_mb, **loss.options)
    assert len(storages.seen) == 1


@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_other_users_of_overwritten_hidden_states_are_told(fp32, loss, ignored):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, ignored=ignored)
    hidden = tensors["hidden"].requires_grad_() * 1
    other = hidden.square().sum()  # saves hidden
    value = loss.op(**{**tensors, "hidden": hidden}, overwrite_hidden=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (value + other).backward()


def test_hidden_states_without_gradient_are_not_overwritten(fp32, loss):
    tensors = loss.inputs(5, 6, 21, device=fp32.device)
    hidden, before = tensors["hidden"], tensors["hidden"].clone()
    tensors["weight"].requires_grad_()
    loss.op(**tensors, overwrite_hidden=True).loss.backward()
    with torch.no_grad():
        loss.op(**{**tensors, "hidden": hidden.clone().requires_grad_() * 1}, overwrite_hidden=True)
    assert torch.equal(hidden, before) and tensors["weight"].grad.any()


def test_second_backward_over_hidden(fp32, loss):
    tensors = loss.inputs(5, 6, 21, device=fp32.device, bias=True, ignored=0.2)
    truth = evaluate(loss.reference, tensors)
    leaves = [tensors[k].requires_grad_() for k in LEAVES]
    value = over_a_copy(loss)(**tensors).loss
    results = [torch.autograd.grad(value, leaves, torch.full_like(value, f), retain_graph=f != 2) for f in (3, 1, 2)]
    for factor, grads in zip((3, 1, 2), results, strict=True):
        assert_near(dict(zip(LEAVES, grads, strict=True)), {k: factor * truth[f"d_{k}"] for k in LEAVES})


@pytest.mark.parametrize("hidden, weight", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
@pytest.mark.parametrize(
    "how", [{}, {"recompute": True}, {"overwrite_hidden": True}, {"accumulate_dtype": torch.float32}]
)
def test_mixed_dtypes(loss, hidden, weight, how, monkeypatch):
    """Products in what both promote to; each gradient in its own input's dtype."""
    set_path(monkeypatch, "torch")
    tensors = loss.inputs(7, 6, 21)
    tensors["hidden"], tensors["weight"] = (
        tensors["hidden"].to(getattr(torch, hidden)), tensors["weight"].to(getattr(torch, weight)),
    )  # fmt: skip
    op = over_a_copy(loss) if "overwrite_hidden" in how else functools.partial(loss.op, **how)
    got = evaluate(op, tensors, workspace_mb=0.0005)
    truth = evaluate(loss.reference, {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()})
    for name in ("d_hidden", "d_weight"):
        assert got[name].dtype == tensors[name[2:]].dtype
        torch.testing.assert_close(got[name].float(), truth[name], rtol=1e-2, atol=5e-3)
    torch.testing.assert_close(got["loss"], truth["loss"])


@pytest.mark.parametrize("change, message", [
    ({"token_weight": torch.ones(3)}, r"token_weight must be one per row .* is \(3,\), hidden \(4, 6\)"),
    ({"reduction": "sum"}, 'reduction must be "mean" or "none", got \'sum\'. For a sum, give num_items=1'),
    ({"reduction": "none"}, 'reduction="none" needs recompute=True'),
    ({"reduction": "none", "recompute": True, "num_items": 4}, 'with reduction="none" it has no use'),
    ({"overwrite_hidden": True, "hidden": torch.zeros(4, 6).requires_grad_()}, "would overwrite a leaf"),
    ({"overwrite_hidden": True, "recompute": True}, "overwrite_hidden works without recompute"),
    ({"accumulate_dtype": torch.bfloat16}, "accumulate_dtype must be None or torch.float32, got torch.bfloat16"),
])  # fmt: skip
def test_refusals(loss, change, message):
    with pytest.raises(ValueError, match=message):
        loss.op(**{**loss.inputs(4, 6, 21), **change})


ALL = {"softcap": 15.0, "scale": 1.5, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-3}
SHAPES = [(1, 64, 32003), (333, 96, 5001), (2048, 576, 49152)]
ON_GPU = [("cross_entropy", shape, ALL | {"workspace_mb": mb}) for shape in SHAPES for mb in (None, 4)]
ON_GPU += [("divergence", SHAPES[1], {"kind": "jsd", "ce_weight": 0.4, "workspace_mb": 4})]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name, shape, options", ON_GPU, ids=str)
def test_recomputed_on_gpu(name, shape, options, dtype):
    loss = LOSSES[name]
    tensors = loss.inputs(*shape, dtype=dtype, device="cuda", bias=True, ignored=0.3)
    tensors["token_weight"] = torch.rand(shape[0], device="cuda")
    check(loss.op, loss.reference, tensors, 3.0, recompute=True, workspace_mb=options["workspace_mb"])
    upstream = torch.linspace(-1.5, 3.0, shape[0], device="cuda")
    check(loss.op, loss.reference, tensors, upstream, recompute=True, reduction="none", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{"accumulate_dtype": torch.float32}, {"overwrite_hidden": True}], ids=str)
def test_modes_on_gpu(how):
    loss = LOSSES["cross_entropy"]
    tensors = loss.inputs(2048, 576, 49152, dtype=torch.bfloat16, device="cuda", ignored=0.3)

    def op(hidden, **values):
        return loss.op(hidden.clone(), **values)

    check(op, loss.reference, tensors, 3.0, workspace_mb=16, **how)
