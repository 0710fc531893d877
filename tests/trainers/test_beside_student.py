"""The teacher's forward beside the student's: who may, and what waits for what. On a GPU: test_host_ahead.py."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import completions, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.losses.dense import DenseAnswer
from liger_trainer.losses.spec import BatchTargets, Distillation, LossOptions
from liger_trainer.trainers import beside_student
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


def test_the_loss_waits_for_a_teacher_on_a_stream_of_its_own(done):
    torch.manual_seed(0)
    student, logits, labels = torch.randn(1, 3, 9), torch.randn(1, 3, 9), torch.tensor([[1, 2, 3]])
    teaching: Any = SimpleNamespace(answer=lambda inputs: done.append("answers") or logits)
    layers: Any = SimpleNamespace(are_recorded=False)
    answers = AnswersBeside(teaching, layers)
    assert answers({}) is logits and done == ["answers"]
    done.clear()
    layers.are_recorded = True
    packed = {"cu_seq_lens_q": labels}  # of which both models read one table
    assert answers(packed) is logits and done == ["answers"]
    with torch.no_grad():
        assert answers({}) is logits and done == ["answers"] * 2
    done.clear()
    answer = answers({})
    assert done == [
        "the teacher waits for the student", "on its stream", "answers", "off its stream", "the teacher is done",
    ]  # fmt: skip
    assert isinstance(answer, DenseAnswer) and answer.shape == (1, 3, 9)
    options = LossOptions(distillation=Distillation({"forward_kl": 1.0}))
    targets = BatchTargets.of(labels, None, None)
    loss = answer.loss(student, targets, options).loss
    assert done[5:] == ["the loss waits for the teacher"]
    assert torch.equal(loss, DenseAnswer(logits).loss(student, targets, options).loss)


def distill(**options) -> LigerDistillTrainer:
    return LigerDistillTrainer(
        tiny_model("llama"), tiny_model("llama", seed=1), train_args(LigerDistillConfig, **options),
        train_dataset=completions(), processing_class=tiny_tokenizer(),
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
    plain = LigerTrainer(
        tiny_model("llama"), train_args(LigerConfig), train_dataset=completions(), processing_class=tiny_tokenizer()
    )
    assert not can_answer_beside(plain)
