import functools
import itertools

import pytest
import torch
from kernel_checks import LEAVES, check, evaluate, random_inputs

from liger_trainer.kernels import linear_uld as module
from liger_trainer.kernels._linear_head import Lora, RowSelection
from liger_trainer.kernels.linear_uld import linear_uld, linear_uld_reference, uld_reference

TINY = 1e-6  # MiB: a chunk for every row
ALL = {
    "temperature": 1.5, "softcap": 7.0, "teacher_softcap": 9.0, "scale": 0.8, "teacher_scale": 1.2, "ce_weight": 0.4,
    "uld_weight": 1.5, "num_items": 7, "label_smoothing": 0.1,
}  # fmt: skip
OPTIONS = {
    "scale": {"scale": 0.5, "teacher_scale": 1.5},
    "softcap": {"softcap": 5.0, "teacher_softcap": 3.0},
    "T 2": {"temperature": 2.0},
    "T 0.5": {"temperature": 0.5},
    "T 4 unscaled": {"temperature": 4.0, "scale_by_temperature_squared": False},
    "weights": {"uld_weight": 0.7, "ce_weight": 0.5},
    "smoothing": {"ce_weight": 0.5, "label_smoothing": 0.2},
    "ce alone": {"uld_weight": 0.0, "ce_weight": 0.5},
    "num_items": {"num_items": 7},
    "padded": {"vocab_size": 31, "teacher_vocab_size": 50},
    "all": ALL,
}
check_uld = functools.partial(check, linear_uld, linear_uld_reference)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_uld(
    n=6, m=9, h=12, teacher_h=7, v=37, teacher_v=53, *, dtype=torch.float32, bias=False, ignored=0.0, labels=True,
    partners=True, seed=0,
) -> dict:  # fmt: skip
    """Rows of which some have no partner, and some the same."""
    student = random_inputs(n, h, v, bias=bias, ignored=ignored, seed=seed)
    teacher = random_inputs(m if partners else n, teacher_h, teacher_v, bias=bias, seed=seed + 1)
    tensors = student | {f"teacher_{k}": x for k, x in teacher.items() if k != "labels"}
    if partners:
        tensors["partners"] = torch.randint(-1, m, (n,), generator=torch.Generator().manual_seed(seed))
        tensors["partners"][: min(n, 1)] = -1
    if not labels:
        del tensors["labels"]
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in tensors.items()}


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 2, 3), (5, 3, 3, 4, 24, 24), (7, 9, 24, 5, 101, 40), (3, 4, 7, 9, 8, 99)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabularies_of_any_two_sizes(sizes, dtype):
    check_uld(random_uld(*sizes, dtype=dtype))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_options(options, dtype):
    tensors = random_uld(8, dtype=dtype, bias=True, ignored=0.3)
    tensors["labels"] %= 31  # of -100 the remainder is a token
    tensors["labels"][2] = -100
    check_uld(tensors, **options)


def test_the_distance_is_the_cheapest_way_to_move_probability():
    """Over all ways to pair up the tokens, as its definition has it: the Wasserstein distance with equal costs."""
    s, t = (torch.randn(4, v, generator=torch.Generator().manual_seed(v), dtype=torch.float64) * 2 for v in (4, 5))
    q, p = torch.nn.functional.pad(s.softmax(-1), (0, 1)), t.softmax(-1)
    pairings = torch.stack([(q - p[:, list(order)]).abs().sum(-1) for order in itertools.permutations(range(5))])
    torch.testing.assert_close(uld_reference(s, t), pairings.amin(0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("squared", [True, False])
def test_value_and_gradient_agree_by_finite_differences(temperature, squared):
    tensors = random_uld(5, dtype=torch.float64, bias=True)
    options = {"temperature": temperature, "scale_by_temperature_squared": squared, "ce_weight": 0.3}
    got = evaluate(linear_uld, tensors, **options)
    step, generator = 1e-6, torch.Generator().manual_seed(3)
    for name in LEAVES:
        way = torch.randn(tensors[name].shape, generator=generator, dtype=torch.float64)
        up, down = (
            linear_uld(**{**tensors, name: tensors[name] + sign * step * way}, **options).loss for sign in (1, -1)
        )
        assert ((up - down) / (2 * step)).item() == pytest.approx((got[f"d_{name}"] * way).sum().item(), rel=1e-6)


def test_a_student_equal_to_its_teacher_loses_nothing():
    tensors = random_uld(6, 6, 12, 12, 37, 37, partners=False)
    for name in ("hidden", "weight"):
        tensors[f"teacher_{name}"] = tensors[name].clone()
    got = evaluate(linear_uld, tensors)
    assert got["loss"] == 0 and not got["uld"].any() and not got["d_hidden"].any() and not got["d_weight"].any()
    shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    tensors["teacher_weight"] = tensors["weight"][shuffled]  # other ids for the same tokens
    assert evaluate(linear_uld, tensors)["loss"] < 1e-6


def test_padding_of_either_head_changes_nothing():
    tensors = random_uld(6, bias=True)
    want = evaluate(linear_uld, tensors, **ALL)
    for side, size in (("", 37), ("teacher_", 53)):
        for name, rows in (
            ("weight", torch.full((5, tensors[f"{side}hidden"].shape[1]), 3.0)),
            ("bias", torch.ones(5)),
        ):
            tensors[f"{side}{name}"] = torch.cat([tensors[f"{side}{name}"], rows])
        tensors[f"{side}weight"].requires_grad_(False)
        got = evaluate(linear_uld, tensors, vocab_size=37, teacher_vocab_size=53, **ALL)
        assert torch.equal(got["d_weight"][:37], want["d_weight"]) and not got["d_weight"][37:].any()
        for name in want.keys() - {"d_weight", "d_bias"}:
            assert torch.equal(got[name], want[name]), f"{side}{size}: {name}"


def test_a_row_without_a_partner_has_cross_entropy_alone():
    tensors = random_uld(6)
    tensors["partners"][:] = torch.tensor([3, -1, 0, -1, 8, 8])
    got = check_uld(tensors, ce_weight=0.5)
    assert torch.equal(got["uld"] > 0, tensors["partners"] >= 0)
    alone = evaluate(linear_uld, tensors)
    assert not alone["d_hidden"][[1, 3]].any() and alone["loss"].item() == pytest.approx(got["uld"].sum().item() / 6)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("workspace_mb", [TINY, 0.0005, 512])
@pytest.mark.parametrize("few", [True, False], ids=["sorted by rows", "sorted at once"])
def test_ignored_rows_chunks_and_sorting(monkeypatch, ignored, workspace_mb, few):
    if few:
        monkeypatch.setattr(module, "SORTED_BYTES", 2 * module.BYTES_A_NUMBER * 53)
    tensors = random_uld(9, bias=True, ignored=ignored)
    tensors["token_weight"] = torch.linspace(0.5, 2, 9)
    got = check_uld(tensors, workspace_mb=workspace_mb, **ALL)
    skipped = tensors["labels"] == -100
    for name in got.keys() - {"loss", "d_weight", "d_bias"}:
        assert not got[name][skipped].any(), f"{name} of ignored rows must be 0"


@pytest.mark.parametrize("partners", [True, False])
def test_without_labels_every_row_takes_part(partners):
    got = check_uld(random_uld(labels=False, partners=partners))
    assert not got["log_prob"].any() and not got["is_top1"].any() and got["entropy"].all()


@pytest.mark.parametrize("m", [0, 4])
def test_empty_batch(m):
    got = check_uld(random_uld(0, m, bias=True))
    assert got["loss"] == 0 and not got["d_weight"].any()


@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("weight", "bias")], ids=str)
def test_frozen_inputs(frozen):
    check_uld(random_uld(8, bias=True, ignored=0.3), frozen=frozen, ce_weight=0.5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_recomputed(reduction, dtype):
    upstream = torch.linspace(-1, 2, 8) if reduction == "none" else 0.3
    options = {key: x for key, x in ALL.items() if reduction == "mean" or key != "num_items"}
    tensors = random_uld(8, dtype=dtype, bias=True, ignored=0.3)
    check_uld(tensors, upstream, recompute=True, reduction=reduction, workspace_mb=TINY, **options)


def test_adapters_on_both_heads():
    tensors = random_uld(8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)

    def lora(v, h):
        return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, h), (v, 2))]

    pairs = lora(37, 12), lora(53, 7)
    grads = []
    for op in (linear_uld, linear_uld_reference):
        of_student, of_teacher = ([x.clone().requires_grad_() for x in pair] for pair in pairs)
        loss = op(**tensors, lora=Lora(*of_student, 0.5), teacher_lora=Lora(*of_teacher, 0.7), ce_weight=0.5).loss
        loss.backward()
        grads.append([loss.detach(), *(x.grad for x in of_student)])
        assert all(x.grad is None for x in of_teacher)
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_autocast_and_a_selection_of_rows():
    """fp32 weights under bf16 autocast: products in bf16, gradients in the weights' dtype, as plain torch has them."""
    tensors = random_uld(16, 16, ignored=0.3)
    plain = evaluate(linear_uld_reference, tensors, ce_weight=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        rows = RowSelection(tensors["labels"], torch.tensor(11))
        got = evaluate(linear_uld, tensors, rows=rows, ce_weight=0.5)
        narrow = evaluate(linear_uld_reference, tensors, num_items=11, ce_weight=0.5)
    share = int((tensors["labels"] != -100).sum()) / 11
    for name in ("loss", "d_hidden", "d_weight"):
        assert got[name].dtype == torch.float32
        error, of_plain = (float((x[name] - share * plain[name]).norm()) for x in (got, narrow))
        assert 0 < error <= 2 * of_plain + 1e-4 * float(plain[name].norm()), name


def test_no_gradient_and_no_logits_of_all_rows(monkeypatch):
    tensors = random_uld(32, 32)
    sizes, made = [], module.workspace
    monkeypatch.setattr(module, "workspace", lambda rows, *rest: sizes.append(rows) or made(rows, *rest))
    megabytes = 4 * (37 + 53) * 4 / 2**20  # four rows of both sides
    linear_uld(**tensors, workspace_mb=megabytes)
    assert sizes and max(sizes) <= 4
    assert not linear_uld(**tensors).loss.requires_grad


def test_under_compile_it_is_one_op():
    tensors = random_uld(6, bias=True, ignored=0.3)
    compiled = torch.compile(functools.partial(linear_uld, **ALL), backend="aot_eager", fullgraph=True)
    got, want = (evaluate(op, tensors) for op in (compiled, functools.partial(linear_uld, **ALL)))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"partners": None}, "hidden has 6 rows and teacher_hidden 9: give partners"),
        ({"partners": torch.zeros(5, dtype=torch.int64)}, r"partners must be int64, one per row of hidden: .*\(5,\)"),
        ({"partners": torch.zeros(6)}, "partners must be int64"),
        ({"teacher_hidden": torch.zeros(0, 7)}, "teacher_hidden has no rows"),
        ({"teacher_vocab_size": 0}, "teacher_vocab_size must be at least 1 or None, got 0"),
        ({"vocab_size": 0}, "^vocab_size must be at least 1 or None, got 0"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
        ({"labels": None, "ce_weight": 0.5}, "cross-entropy needs labels"),
        ({"teacher_hidden": torch.zeros(9, 8)}, "teacher_hidden .* must share H"),
        ({"reduction": "none"}, "needs recompute=True"),
    ],
    ids=str,
)
def test_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        linear_uld(**{**random_uld(), **change})
