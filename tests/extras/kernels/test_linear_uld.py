"""What is of linear_uld: its distance, rows without a partner, sorting, and both heads' adapters.

What it shares with the other fused losses is in tests/kernels, test_linear_losses.py and test_linear_modes.py.
"""

import itertools

import pytest
import torch
from fused_losses import LOSSES, random_uld
from kernel_checks import check, evaluate

from liger_trainer.kernels import linear_uld as module
from liger_trainer.kernels.linear_uld import linear_uld, linear_uld_reference, uld_reference
from liger_trainer.kernels.types import Lora

ALL = LOSSES["uld"].options | {"num_items": 7}
OTHER = {"teacher_v": 53, "m": 9}  # a teacher of more rows: some have no partner, some the same


def check_uld(tensors, **options):
    return check(linear_uld, linear_uld_reference, tensors, **options)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 3, 1), (5, 3, 24, 24, 3), (7, 24, 101, 40, 9), (3, 7, 8, 99, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vocabularies_of_any_two_sizes(sizes, dtype):
    n, h, v, teacher_v, m = sizes
    check_uld(random_uld(n, h, v, teacher_v=teacher_v, m=m, dtype=dtype))


def test_the_distance_is_the_cheapest_way_to_move_probability():
    """Over all ways to pair up the tokens, as its definition has it: the Wasserstein distance with equal costs."""
    s, t = (torch.randn(4, v, generator=torch.Generator().manual_seed(v), dtype=torch.float64) * 2 for v in (4, 5))
    q, p = torch.nn.functional.pad(s.softmax(-1), (0, 1)), t.softmax(-1)
    pairings = torch.stack([(q - p[:, list(order)]).abs().sum(-1) for order in itertools.permutations(range(5))])
    torch.testing.assert_close(uld_reference(s, t), pairings.amin(0))


def test_a_student_equal_to_its_teacher_loses_nothing():
    tensors = random_uld(6, 6, 37, teacher_v=37)
    for name in ("hidden", "weight"):
        tensors[f"teacher_{name}"] = tensors[name].clone()
    got = evaluate(linear_uld, tensors)
    assert not any(got[name].any() for name in ("loss", "uld", "d_hidden", "d_weight"))
    shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    tensors["teacher_weight"] = tensors["weight"][shuffled]  # other ids for the same tokens
    assert evaluate(linear_uld, tensors)["loss"] < 1e-6


def test_a_row_without_a_partner_has_only_cross_entropy():
    tensors = random_uld(6, 12, 37, **OTHER)
    tensors["partners"][:] = torch.tensor([3, -1, 0, -1, 8, 8])
    got = check_uld(tensors, ce_weight=0.5)
    assert torch.equal(got["uld"] > 0, tensors["partners"] >= 0)
    without = evaluate(linear_uld, tensors)
    assert not without["d_hidden"][[1, 3]].any()
    assert without["loss"].item() == pytest.approx(got["uld"].sum().item() / 6)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("workspace_mb", [1e-6, 0.0005, 512])
@pytest.mark.parametrize("few", [True, False], ids=["sorted by rows", "sorted at once"])
def test_ignored_rows_chunks_and_sorting(monkeypatch, ignored, workspace_mb, few):
    if few:
        monkeypatch.setattr(module, "SORTED_BYTES", 2 * module.BYTES_A_NUMBER * 53)
    tensors = random_uld(9, 12, 37, bias=True, ignored=ignored, **OTHER)
    tensors["token_weight"] = torch.linspace(0.5, 2, 9)
    got = check_uld(tensors, workspace_mb=workspace_mb, **ALL)
    skipped = tensors["labels"] == -100
    assert not any(got[name][skipped].any() for name in got.keys() - {"loss", "d_weight", "d_bias"})


@pytest.mark.parametrize("n, m", [(0, 0), (0, 4), (6, 9)])
def test_partners_of_a_batch_without_labels_or_rows(n, m):
    got = check_uld(random_uld(n, 12, 37, labels=False, bias=True, **OTHER | {"m": m}))
    assert not got["log_prob"].any() and not got["is_top1"].any() and got["entropy"].all()
    assert n or (got["loss"] == 0 and not got["d_weight"].any())


def test_adapters_on_both_heads():
    tensors = random_uld(8, 12, 37, dtype=torch.float64, **OTHER)
    generator = torch.Generator().manual_seed(5)

    def lora(v, h):
        return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, h), (v, 2))]

    pairs = lora(37, 12), lora(53, 13)
    grads = []
    for op in (linear_uld, linear_uld_reference):
        of_student, of_teacher = ([x.clone().requires_grad_() for x in pair] for pair in pairs)
        loss = op(**tensors, lora=Lora(*of_student, 0.5), teacher_lora=Lora(*of_teacher, 0.7), ce_weight=0.5).loss
        loss.backward()
        grads.append([loss.detach(), *(x.grad for x in of_student)])
        assert all(x.grad is None for x in of_teacher)
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("change, message", [
    ({"partners": None}, "hidden has 6 rows and teacher_hidden 9: give partners"),
    ({"partners": torch.zeros(5, dtype=torch.int64)}, r"partners must be int64, one per row of hidden: .*\(5,\)"),
    ({"partners": torch.zeros(6)}, "partners must be int64"),
    ({"teacher_hidden": torch.zeros(0, 13)}, "teacher_hidden has no rows"),
], ids=str)  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        linear_uld(**{**random_uld(6, 12, 37, **OTHER), **change})
