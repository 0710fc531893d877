"""The teacher's forward beside the student's: who may, and what waits for what."""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.losses.dense import DenseAnswer
from liger_trainer.losses.spec import BatchTargets, Distillation, LossOptions
from liger_trainer.teachers.model import ModelTeacher
from liger_trainer.trainers import beside_student, host_ahead
from liger_trainer.trainers.beside_student import AnswersBeside, can_answer_beside


class Event:
    def __init__(self, done: list[str]):
        self.done = done

    def wait(self) -> None:
        self.done.append("the loss waits for the teacher")


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """What happens, where streams only say what is asked of them."""
    done: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            done.append(f"the teacher waits for the {other}")

        def record_event(self) -> Event:
            done.append("the teacher is done")
            return Event(done)

    @contextlib.contextmanager
    def on(stream: Stream):
        done.append("on its stream")
        yield
        done.append("off its stream")

    cuda = SimpleNamespace(Stream=Stream, stream=on, current_stream=lambda: "student")
    monkeypatch.setattr(beside_student, "torch", SimpleNamespace(cuda=cuda, is_grad_enabled=torch.is_grad_enabled))
    return done


def answers_of(done: list[str], logits: Any, recorded: bool = True) -> AnswersBeside:
    layers: Any = [SimpleNamespace(have_graphs_of=lambda shape: recorded and shape == (1, 3)) for _ in range(2)]
    teaching: Any = SimpleNamespace(answer=lambda inputs: done.append("answers") or logits)
    return AnswersBeside(teaching, layers)


def test_the_loss_waits_for_a_teacher_on_a_stream_of_its_own(done):
    torch.manual_seed(0)
    student, logits, labels = torch.randn(1, 3, 9), torch.randn(1, 3, 9), torch.tensor([[1, 2, 3]])
    inputs = {"input_ids": labels}
    others = [
        (answers_of(done, logits, recorded=False), inputs),
        (answers_of(done, logits), {"input_ids": labels.T}),  # of which there are no graphs
        (answers_of(done, logits), {**inputs, "cu_seq_lens_q": labels}),  # packed: both models read one table
    ]
    for answers, given in others:
        assert answers(given) is logits
    with torch.no_grad():
        assert answers_of(done, logits)(inputs) is logits
    assert done == ["answers"] * 4
    done.clear()
    answer = answers_of(done, logits)(inputs)
    assert done == [
        "the teacher waits for the student", "on its stream", "answers", "off its stream", "the teacher is done",
    ]  # fmt: skip
    assert isinstance(answer, DenseAnswer) and answer.shape == (1, 3, 9)
    options = LossOptions(distillation=Distillation({"forward_kl": 1.0}))
    targets = BatchTargets.of(labels, None, None)
    loss = answer.loss(student, targets, options).loss
    assert done[5:] == ["the loss waits for the teacher"]
    assert torch.equal(loss, DenseAnswer(logits).loss(student, targets, options).loss)


def distill(rows=None, cls=LigerDistillTrainer, **options) -> LigerDistillTrainer:
    return cls(
        tiny_model("qwen3"), tiny_model("qwen3", seed=1), train_args(LigerDistillConfig, **options),
        train_dataset=rows or completions(), eval_dataset=rows, processing_class=tiny_tokenizer(),
    )  # fmt: skip


def test_who_may():
    assert can_answer_beside(distill())
    hidden = [{"type": "forward_kl"}, {"type": "hidden_mse", "layers": "last"}]
    assert not can_answer_beside(distill(losses=hidden))  # these read more of the teacher than its logits
    elsewhere = distill()
    elsewhere.args.teacher_device = "cuda:1"
    assert not can_answer_beside(elsewhere)
    own_images = distill()
    own_images.teaching.draws_by = object()  # nobody keeps its images until the loss
    assert not can_answer_beside(own_images)
    slices = distill()
    slices.shards_sequences = lambda: True
    assert not can_answer_beside(slices)
    plain = LigerTrainer(
        tiny_model("qwen3"), train_args(LigerConfig), train_dataset=completions(), processing_class=tiny_tokenizer()
    )
    assert not can_answer_beside(plain)


# on a GPU

LENGTH, LATE = 16, 20_000_000  # cycles, some 10 ms


def rows(n: int = 40) -> Dataset:
    """Rows that are padded to one length: each batch of two has one that is shorter."""
    ids = torch.randint(5, 59, (n, LENGTH), generator=torch.Generator().manual_seed(3)).tolist()
    ids = [row[: LENGTH - 5 * (i % 2)] for i, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


class Reversing(LigerDistillTrainer):
    """Trains on reversed rows."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        reversed_rows = {name: inputs[name].flip(1) for name in ("input_ids", "labels")}
        return super().compute_loss(model, {**inputs, **reversed_rows}, *args, **kwargs)


class Forks(AnswersBeside):
    """Counts the answers on the teacher's stream."""

    forks = 0

    def __call__(self, inputs):
        answer = super().__call__(inputs)
        Forks.forks += isinstance(answer, DenseAnswer)
        return answer


GPU_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 4},
    "inputs made anew": {"cls": Reversing},
}
LATE_METHODS = {"teacher": (ModelTeacher, "answer"), "student": (LigerDistillTrainer, "training_step")}


def begins_late(function):
    """Return a function whose work on the GPU begins late, on the stream that it is called in."""

    @functools.wraps(function)
    def late(*args, **kwargs):
        torch.cuda._sleep(LATE)
        return function(*args, **kwargs)

    return late


def losses_of(cuda_graphs: str, cls=LigerDistillTrainer, **options) -> list[float]:
    """Return the losses of all micro-batches of a training and its evaluations."""
    trainer = distill(
        rows(), cls, losses=[{"type": "forward_kl"}], cuda_graphs=cuda_graphs, max_steps=12, logging_steps=12,
        learning_rate=3e-3, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_length=LENGTH,
        pad_to_multiple_of=LENGTH, dataset_kwargs={"skip_prepare_dataset": True}, use_cpu=False,
        dataloader_pin_memory=True, **options,
    )  # fmt: skip
    losses: list[torch.Tensor] = []
    compute = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        result = compute(*args, **kwargs)
        losses.append((result[0] if isinstance(result, tuple) else result).detach().clone())
        return result

    trainer.compute_loss = compute_loss
    trainer.train()
    return torch.stack(losses).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("late", LATE_METHODS)
@pytest.mark.parametrize("options", GPU_CASES.values(), ids=GPU_CASES)
def test_late_streams_change_no_loss(monkeypatch, late, options):
    """Whichever stream is late, losses are those of one stream."""
    want = losses_of("never", **options)
    owner, name = LATE_METHODS[late]
    monkeypatch.setattr(owner, name, begins_late(getattr(owner, name)))
    monkeypatch.setattr(host_ahead, "AnswersBeside", Forks)
    Forks.forks = 0
    assert losses_of("always", **options) == pytest.approx(want, rel=1e-3)
    assert Forks.forks >= 9
