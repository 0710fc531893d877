"""Row kernels whose columns lie on several ranks, against those of whole rows. Ranks are threads that take turns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from quick_cases import slow_but

from liger_trainer.kernels import _divergence_shards, _triton
from liger_trainer.kernels._cross_entropy_rows import FIELDS as CE_FIELDS
from liger_trainer.kernels._cross_entropy_rows import CrossEntropyOptions, Targets, Tile, whole_rows
from liger_trainer.kernels._divergence_kernels import divergence_rows
from liger_trainer.kernels._divergence_shards import divergence_shard
from liger_trainer.kernels._divergence_torch import FIELDS, TERMS, DivergenceOptions, RowInputs
from liger_trainer.kernels._logits import LogitTransform
from liger_trainer.kernels._vocab_parallel import shard_rows
from liger_trainer.kernels.divergence_kinds import ROW_KINDS

N, V = 6, 2600  # wider than a program's block
CUTS = [0, 1100, 1100, 2595, 2600]  # of four ranks: one has no column, one has few


class Ranks:
    """Collectives of threads, one of which runs at a time: Triton's interpreter has one state for all."""

    def __init__(self, count):
        self._turn, self._tensors = threading.Lock(), []
        self._arrive, self._leave = threading.Barrier(count), threading.Barrier(count)

    def run(self, work, *parts):
        def one(arguments):
            with self._turn:
                return work(*arguments)

        with ThreadPoolExecutor(len(CUTS) - 1) as pool:
            return list(pool.map(one, zip(*parts, strict=True)))

    def _combine(self, x, how):
        self._tensors.append(x.clone())
        self._turn.release()
        self._arrive.wait(60)
        self._turn.acquire()
        result = how(torch.stack(self._tensors))
        self._turn.release()
        if self._leave.wait(60) == 0:
            self._tensors.clear()
        self._arrive.wait(60)
        self._turn.acquire()
        return x.copy_(result)

    def sum_(self, x):
        return self._combine(x, lambda each: each.sum(0))

    def max_(self, x):
        return self._combine(x, lambda each: each.amax(0))


def columns():
    return [slice(a, b) for a, b in zip(CUTS, CUTS[1:], strict=False)]


def workspace(x):
    """As the ops allocate it: rows a multiple of 16 numbers apart."""
    out = torch.full((x.shape[0], -(-x.shape[1] // 16) * 16), torch.nan, dtype=x.dtype, device=x.device)
    out = out[:, : x.shape[1]]
    return out.copy_(x)


@pytest.fixture(params=["triton", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(_triton, "INTERPRETED", False)
        monkeypatch.setattr(_divergence_shards, "BLOCK", 3 * 1500)
    elif not (_triton.INSTALLED and _triton.INTERPRETED):
        pytest.skip("needs Triton's interpreter")
    return request.param


def logits(seed):
    torch.manual_seed(seed)
    student, teacher = 3 * torch.randn(N, V), 3 * torch.randn(N, V)
    student[:, 5] = teacher[:, 5] = -torch.inf  # ruled out by both
    student[0, 7] = teacher[0, 7] = 20.0  # a head of one token, of which both are sure
    labels = torch.randint(V, (N,))
    labels[1] = V - 1
    return student, teacher, labels


def options_of(name):
    if name in ROW_KINDS:
        return DivergenceOptions({name: 1.0})
    common = dict(ce_weight=0.5, z_loss=0.01, label_smoothing=0.1, alpha=0.3, beta=0.4)
    weights = {kind: 0.2 + 0.1 * i for i, kind in enumerate(ROW_KINDS)}
    if name == "mixed at a temperature":
        transforms = LogitTransform(0.8, 12.0), LogitTransform(1.2, 15.0)
        return DivergenceOptions(weights, temperature=1.7, student=transforms[0], teacher=transforms[1], **common)
    return DivergenceOptions(weights, teacher_share=0.6, scale_by_temperature_squared=False, **common)


NAMES = [*ROW_KINDS, "mixed at a temperature", "mixed with a share"]


@pytest.mark.parametrize("name", slow_but(NAMES, "forward_kl", "tvd", *NAMES[-2:]))
def test_divergences(name, path):
    o, (student, teacher, labels) = options_of(name), logits(NAMES.index(name))
    biases = (torch.randn(V), torch.randn(V)) if "temperature" in name else (None, None)
    weight = torch.rand(N) if "mixed" in name else None
    want, gradient = torch.zeros(len(FIELDS), N), torch.empty(N, V)
    truth = (x if x is None else x.double() for x in (student, teacher, *biases))
    rows = RowInputs(*truth, labels, None if weight is None else weight.double())
    want64, gradient64 = want.double(), gradient.double()
    divergence_rows(rows, want64, gradient64, o)
    ranks = Ranks(len(CUTS) - 1)

    def one(part):
        s, t = workspace(student[:, part]), workspace(teacher[:, part])
        out, grad = torch.zeros(len(FIELDS), N), workspace(torch.empty_like(s))
        local = (None if bias is None else bias[part] for bias in biases)
        divergence_shard(RowInputs(s, t, *local, labels, weight), part.start, V, out, grad, o, ranks)
        return out, grad

    results = ranks.run(one, columns())
    measured = [*range(TERMS), *(TERMS + i for i, kind in enumerate(ROW_KINDS) if kind in o.weights)]
    for out, _ in results:
        torch.testing.assert_close(out[measured], want64[measured].float(), rtol=1e-4, atol=2e-5)
    got = torch.cat([grad for _, grad in results], 1)
    scale = gradient64.abs().max().item()
    torch.testing.assert_close(got / scale, (gradient64 / scale).float(), rtol=1e-4, atol=3e-5)


def test_a_student_like_its_teacher_has_no_loss(path):
    student, _, labels = logits(0)
    ranks = Ranks(len(CUTS) - 1)

    def one(part):
        s, t = workspace(student[:, part]), workspace(student[:, part])
        out, grad = torch.zeros(len(FIELDS), N), torch.empty_like(s)
        o = DivergenceOptions(dict.fromkeys(ROW_KINDS, 1.0), temperature=1.3)
        divergence_shard(RowInputs(s, t, None, None, labels, None), part.start, V, out, grad, o, ranks)
        return out[0].abs().max().item(), grad.abs().max().item() if grad.numel() else 0.0

    for loss, gradient in ranks.run(one, columns()):
        assert loss == gradient == 0


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "everything"])
def test_cross_entropy(plain, path):
    student, _, labels = logits(3)
    o = CrossEntropyOptions()
    bias, weight = None, None
    if not plain:
        o = CrossEntropyOptions(LogitTransform(0.7, 10.0), 1.3, 0.1, 0.01, dft=True)
        bias, weight = torch.randn(V), torch.rand(N)
    want, gradient = torch.zeros(len(CE_FIELDS), N, dtype=torch.float64), torch.empty(N, V, dtype=torch.float64)
    bias64, weight64 = (None if x is None else x.double() for x in (bias, weight))
    whole_rows(student.double(), bias64, Targets(labels, weight64), want, gradient, o)
    ranks = Ranks(len(CUTS) - 1)

    def one(part):
        raw, out = workspace(student[:, part]), torch.zeros(len(CE_FIELDS), N)
        tile = Tile(raw, None if bias is None else bias[part], part.start, V)
        shard_rows(tile, Targets(labels, weight), out, raw, o, ranks)
        return out, raw

    results = ranks.run(one, columns())
    for out, _ in results:
        torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.cat([x for _, x in results], 1), gradient.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["forward_kl", "skew_kl", "mixed at a temperature", "mixed with a share"])
def test_divergences_on_a_gpu(name, dtype):
    """Within twice the error of the whole row's kernel."""
    o, (student, teacher, labels) = options_of(name), (x.cuda() for x in logits(NAMES.index(name)))
    if o.label_smoothing:  # over a token that is ruled out it makes every loss infinite
        student[:, 5] = teacher[:, 5] = 0.0
    student, teacher = student.to(dtype), teacher.to(dtype)
    truth, gradient = (torch.zeros(n, m, dtype=torch.float64, device="cuda") for n, m in ((len(FIELDS), N), (N, V)))
    divergence_rows(RowInputs(student.double(), teacher.double(), None, None, labels, None), truth, gradient, o)
    whole, of_whole = torch.zeros(len(FIELDS), N, device="cuda"), workspace(student)
    divergence_rows(RowInputs(of_whole, workspace(teacher), None, None, labels, None), whole, of_whole, o)
    ranks = Ranks(len(CUTS) - 1)

    def one(part):
        s, t = workspace(student[:, part]), workspace(teacher[:, part])
        out = torch.zeros(len(FIELDS), N, device="cuda")
        divergence_shard(RowInputs(s, t, None, None, labels, None), part.start, V, out, s, o, ranks)
        return out, s

    results = ranks.run(one, columns())
    got = torch.cat([grad for _, grad in results], 1)
    for ours, theirs, right in ((got, of_whole, gradient), (results[0][0][0], whole[0], truth[0])):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (ours, theirs))
        assert error <= 2 * allowed + 1e-5
