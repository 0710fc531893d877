"""Heads whose rows lie on several ranks: loss, gradients and per-token values are those of one rank with all tokens.

Run as a script in each of the processes, it writes by case the largest errors of loss, gradients and per-token values,
relative to the largest of their numbers: of shards, and of one rank in fp32.
"""

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from processes import finish, outcome_of

from liger_trainer.kernels import _divergence_shards
from liger_trainer.kernels._linear_loss import Execution
from liger_trainer.kernels._vocab_parallel import chunk_rows
from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_cross_entropy import Lora, VocabParallel, linear_cross_entropy
from liger_trainer.kernels.linear_divergence import linear_divergence
from liger_trainer.kernels.types import RowSelection

H, V = 12, 37  # no multiple of the ranks: the last shard is smaller
COUNTS = {1: [7], 2: [9, 5], 4: [9, 0, 5, 14]}  # tokens by rank, one has none


def rows_of(vocab, size, rank):
    """Return the rows of a rank as DTensor's Shard(0) cuts them."""
    each = -(-vocab // size)
    return slice(min(rank * each, vocab), min((rank + 1) * each, vocab))


class Problem:
    """Tokens of all ranks and a head, and the parts of one rank."""

    def __init__(self, size, rank, tokens, dtype, vocab=V, seed=0):
        torch.manual_seed(seed)
        self.size, self.rank, self.tokens, self.dtype, self.vocab = size, rank, tokens, dtype, vocab
        self.counts = COUNTS[size] if tokens == "sharded" else [sum(COUNTS[size])]
        n = sum(self.counts)

        def random(*shape):
            return torch.randn(*shape).to(dtype)

        self.hidden, self.weight = random(n, H), random(vocab, H)
        self.teacher_hidden, self.teacher_weight = random(n, 2 * H), random(vocab, 2 * H) / 2
        self.bias, self.token_weight, self.upstream = random(vocab), random(n).abs(), random(n).abs()
        self.lora = random(3, H), random(vocab, 3)
        self.labels = torch.randint(vocab, (n,))
        self.labels[torch.rand(n) < 0.3] = -100
        if tokens == "sharded" and size > 1:
            self.labels[: self.counts[0]] = -100  # a rank without a supervised token
        start = sum(self.counts[:rank]) if tokens == "sharded" else 0
        self.mine = slice(start, start + self.counts[rank if tokens == "sharded" else 0])
        self.held = rows_of(vocab, size, rank)

    def parallel(self, average=False):
        return VocabParallel(dist.group.WORLD, self.held.start, self.vocab, self.tokens, average)

    def leaves(self, mine):
        """Return hidden, weight, bias, lora's a and b that require gradients: this rank's parts, or all."""
        rows, held = (self.mine, self.held) if mine else (slice(None), slice(None))
        a, b = self.lora
        parts = self.hidden[rows], self.weight[held], self.bias[held], a, b[held]
        return [x.clone().requires_grad_() for x in parts]


def error(got, want, everything=None):
    """Return the largest difference, relative to the largest number of `everything`, of which `want` is a part."""
    if not want.numel():
        return 0.0
    largest = (want if everything is None else everything).abs().max().clamp(min=1e-3)
    return ((got - want).abs().max() / largest).item()


def gradients_error(problem, got, want, mine, average):
    """Compare this rank's gradients with its parts of those on one rank, whose loss sums over all tokens.

    a of lora is whole on every rank: its gradient sums over the ranks of sharded tokens.
    """
    assert [x is None for x in got] == [x is None for x in want]
    a, share = got[3], 1 / problem.size if average else 1.0
    if mine and problem.tokens == "sharded" and a is not None:
        dist.all_reduce(a)
    rows, held = (problem.mine, problem.held) if mine else (slice(None), slice(None))
    parts = [(rows, 1.0), (held, share), (held, share), (slice(None), 1.0), (held, share)]
    errors = []
    for x, y, (part, factor) in zip(got, want, parts, strict=True):
        if x is not None:
            errors.append(error(x, y[part] * factor, y * factor))
    return max(errors)


def run(problem, op, parts, options, mine):
    """Return (result, gradients of `problem.leaves`)."""
    hidden, weight, bias, a, b = leaves = problem.leaves(mine)
    frozen = "frozen" in parts
    if frozen:
        weight.requires_grad_(False)
    if "bias" in parts:
        options = {**options, "bias": bias}
    if "lora" in parts:
        options = {**options, "lora": Lora(a, b, 0.5)}
    rows = problem.mine if mine else slice(None)
    if "token_weight" in parts:
        options = {**options, "token_weight": problem.token_weight[rows]}
    result = op(problem, hidden, weight, rows, mine, options)
    loss = result.loss
    (loss * problem.upstream[rows] if loss.dim() else loss).sum().backward()
    return result, [leaf.grad for leaf in leaves]


def cross_entropy(problem, hidden, weight, rows, mine, options):
    """shared: the ranks' counts are exchanged ahead of the loss."""
    options = dict(options)
    if options.pop("shared", False):
        options["rows"] = RowSelection(problem.labels[rows], options.pop("num_items"))
        if mine:
            options["rows"].share(dist.group.WORLD)
    return linear_cross_entropy(hidden, weight, problem.labels[rows], **options)


def divergence(problem, hidden, weight, rows, mine, options):
    """The teacher's head lies on the ranks as the student's does, unless `whole_teacher` says that each has all."""
    options = dict(options)
    whole = options.pop("whole_teacher", False) or not mine
    teacher_weight = problem.teacher_weight if whole else problem.teacher_weight[problem.held]
    if not whole:
        options["teacher_parallel"] = problem.parallel()
    if options.pop("unlabelled", False):
        labels = None
    else:
        labels = problem.labels[rows]
        labels = labels.where(labels < 0, labels % options.get("vocab_size", V))
    teacher_hidden = problem.teacher_hidden[rows]
    return linear_divergence(hidden, weight, teacher_hidden, teacher_weight, labels=labels, **options)


def compare(name, op, parts=(), average=False, workspace_mb=None, seed=0, **options):
    """Return the errors of fp64 and fp32 shards against one rank in fp64, and those of one rank in fp32."""
    size, rank, errors = dist.get_world_size(), dist.get_rank(), {}
    truth = Problem(size, rank, name[2], torch.float64, seed=seed)
    if options.get("reduction", "mean") == "mean":
        options.setdefault("num_items", 11.0)
    want = run(truth, op, parts, options, False)
    for dtype in (torch.float64, torch.float32):
        problem = Problem(size, rank, name[2], dtype, seed=seed)
        sharded = {**options, "parallel": problem.parallel(average), "workspace_mb": workspace_mb}
        got = run(problem, op, parts, sharded, True)
        errors |= {(dtype, "shards", part): x for part, x in errors_of(problem, got, want, True, average).items()}
    whole = errors_of(problem, run(problem, op, parts, options, False), want, False, False)
    return largest(errors | {(torch.float32, "one rank", part): x for part, x in whole.items()})


def errors_of(problem, got, want, mine, average):
    """Return {"loss", "values", "gradients": error} of this rank's part, or of all."""
    rows = problem.mine if mine else slice(None)
    loss, whole = got[0].loss.detach().clone(), want[0].loss.detach()
    if mine and not loss.dim() and problem.tokens == "sharded":
        dist.all_reduce(loss)
    values = [error(x.double(), y.double()[rows], y.double()) for x, y in per_token(got[0], want[0])]
    return {
        "loss": error(loss, whole[rows] if loss.dim() else whole, whole),
        "values": max(values),
        "gradients": gradients_error(problem, got[1], want[1], mine, average),
    }


def per_token(got, want):
    for name, x in got._asdict().items():
        if name == "terms":
            yield from ((value, want.terms[kind]) for kind, value in x.items())
        elif name != "loss":
            yield x, getattr(want, name)


SMALL = 0.0015  # MiB of workspace: several chunks
CE_CASES = {
    "plain": {},
    "several chunks": {"workspace_mb": SMALL},
    "everything": {
        "parts": ("bias", "lora", "token_weight"), "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 4.0,
        "scale": 0.7, "temperature": 1.3, "workspace_mb": SMALL,
    },
    "frozen": {"parts": ("frozen", "lora")},
    "dft": {"dft": True},
    "counts exchanged ahead": {"shared": True, "num_items": torch.tensor(11.0)},
    "counts exchanged ahead of a number": {"shared": True, "num_items": 11.0},
    "recomputed": {"recompute": True, "parts": ("bias", "token_weight"), "workspace_mb": SMALL},
    "of each token": {"recompute": True, "reduction": "none", "parts": ("token_weight",), "label_smoothing": 0.1},
}  # fmt: skip


MIX = {
    "kind": {kind: 0.1 + 0.2 * i for i, kind in enumerate(KINDS)}, "ce_weight": 0.3, "label_smoothing": 0.1,
    "z_loss": 1e-2, "softcap": 6.0, "teacher_softcap": 5.0, "scale": 0.7, "teacher_scale": 1.2, "beta": 0.3,
}  # fmt: skip
DIVERGENCE_CASES = {
    **{kind: {"kind": kind} for kind in KINDS},
    "mixed": {**MIX, "temperature": 1.7, "workspace_mb": 2 * SMALL, "parts": ("bias", "lora", "token_weight")},
    "shared": {**MIX, "temperature": 0.8, "teacher_share": 0.4, "scale_by_temperature_squared": False},
    "measured": {"kind": dict.fromkeys(KINDS, 0.0), "ce_weight": 1.0, "whole_teacher": True},
    "of a smaller vocabulary": {**MIX, "vocab_size": 21, "parts": ("bias",)},
    "unlabelled": {"kind": "jsd", "unlabelled": True, "workspace_mb": 2 * SMALL},
    "of each token": {"kind": "reverse_kl", "recompute": True, "reduction": "none", "ce_weight": 0.2},
}


def cases():
    for (name, options), tokens in itertools.product(DIVERGENCE_CASES.items(), ("replicated", "sharded")):
        yield ("divergence", name, tokens), divergence, options
    for (name, options), tokens in itertools.product(CE_CASES.items(), ("replicated", "sharded")):
        yield ("ce", name, tokens), cross_entropy, options
    yield ("ce", "averaged", "sharded"), cross_entropy, {"parts": ("bias",), "average": True}


def own_means(problem):
    """Return {name: error} where each rank divides by its own labelled tokens."""
    leaves = problem.leaves(True)
    loss = linear_cross_entropy(*leaves[:2], problem.labels[problem.mine], parallel=problem.parallel()).loss
    loss.backward()
    hidden, weight, *_ = problem.leaves(False)
    bounds = torch.tensor([0, *problem.counts]).cumsum(0).tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    parts = [linear_cross_entropy(hidden[a:b], weight, problem.labels[a:b]).loss for a, b in pairs]
    sum(parts).backward()
    return {
        "loss": error(loss.detach(), parts[problem.rank].detach()),
        "hidden": error(leaves[0].grad, hidden.grad[problem.mine]),
        "weight": error(leaves[1].grad, weight.grad[problem.held]),
    }


def unequal_upstream(problem):
    """Return whether a gradient of the loss that differs between ranks makes the weight's gradient NaN."""
    leaves = problem.leaves(True)
    options = {"parallel": problem.parallel(), "num_items": 7.0}
    loss = linear_cross_entropy(*leaves[:2], problem.labels[problem.mine], **options).loss
    (loss * (1 + problem.rank)).backward()
    return leaves[1].grad.isnan().all().item()


def wrong_label(problem):
    """Return whether a label outside of the vocabulary makes the loss NaN on the ranks that have it."""
    labels = problem.labels[problem.mine].clone()
    labels[:1] = V + 3
    loss = linear_cross_entropy(*problem.leaves(True)[:2], labels, parallel=problem.parallel()).loss
    return loss.isnan().item() == bool(len(labels))


def largest(errors):
    """Return the largest over the ranks; NaN if one is NaN."""
    x = torch.tensor(list(errors.values()), dtype=torch.float64)
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    return dict(zip(errors, torch.stack(everyone).amax(0).tolist(), strict=True))


def main(path):
    _divergence_shards.BLOCK = 40  # blocks of a few rows
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for seed, (name, op, options) in enumerate(cases(), 2):
        results[name] = compare(name, op, seed=seed, **options)
    problem = Problem(size, rank, "sharded", torch.float64, seed=99)
    results["own means"] = largest(own_means(problem))
    results["checks"] = largest({"upstream": not unequal_upstream(problem), "label": not wrong_label(problem)})
    finish(results, path)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request):
    return outcome_of(request.param, "../engines/test_vocabulary_shards.py")


@pytest.mark.parametrize("part", ["loss", "values", "gradients"])
@pytest.mark.parametrize("name", [name for name, *_ in cases()], ids=" ".join)
def test_shards_give_what_one_rank_gives(results, name, part):
    errors = results[name]
    assert errors[torch.float64, "shards", part] < 1e-10
    assert errors[torch.float32, "shards", part] <= 2 * errors[torch.float32, "one rank", part] + 2e-6


def test_ranks_may_divide_by_different_numbers_of_items(results):
    assert max(results["own means"].values()) < 1e-10


@pytest.mark.parametrize("what", ["upstream", "label"])
def test_what_cannot_be_computed_is_nan(results, what):
    assert results["checks"][what] == 0


class Ranks(VocabParallel):
    """Ranks without processes."""

    size, rank = 4, 1


def test_a_chunk_fits_the_workspace():
    ranks = Ranks(None, 0, 256_000)
    rows = chunk_rows(ranks, 2, 4096 * 8, Execution(workspace_mb=512))
    assert rows % 256 == 0
    assert rows * (64_000 * 2 + 4096 * 8) <= 512 * 2**20 < (rows + 256) * (64_000 * 2 + 4096 * 8)


@pytest.mark.parametrize("describe, message", [
    (lambda: VocabParallel(None, 0, 8, tokens="shared"), "replicated, sharded"),
    (lambda: VocabParallel(None, 0, 8, tokens="replicated", average=True), "average is for sharded tokens"),
    (lambda: Ranks(None, 6, 8).check(torch.zeros(4, 2), False), "rows 6 to 10 of a head of 8 rows"),
    (lambda: Ranks(None, 0, 8).check(torch.zeros(4, 2), True), "overwrite_hidden has no place"),
])  # fmt: skip
def test_impossible_descriptions_are_refused(describe, message):
    with pytest.raises(ValueError, match=message):
        describe()


def test_columns_of_a_shared_vocabulary():
    held = [Ranks(None, first, 10).columns(7, 3) for first in (0, 3, 6, 9)]
    assert held == [3, 3, 1, 0]
    assert math.ceil(10 / 4) == Ranks(None, 0, 10).widest


if __name__ == "__main__":
    main(*sys.argv[1:])
