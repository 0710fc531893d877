"""Hidden-state losses: loss and gradients against plain torch, checkpoints and resuming, what is refused."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from safetensors import safe_open
from splits import capture_gradients
from tiny import (
    assert_same_gradients,
    completions,
    divergence_by_hand,
    double_copy,
    shift_labels_of,
    tiny_model,
    tiny_tokenizer,
    train_args,
)
from torch.utils.checkpoint import checkpoint
from trainings import distill, logged, trained
from transformers import Trainer, TrainingArguments
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer import DistillationCallback
from liger_trainer.errors import ConfigError, CorruptError
from liger_trainer.extras.hidden_states import HiddenLosses, _recorded
from liger_trainer.losses.model_parts import decoder_layers
from liger_trainer.losses.plan import LossTerm
from liger_trainer.teachers.cached import CachedTeacher
from liger_trainer.trainers.loss_schedule import LossState

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
PAIRS = {"hidden_mse": [(0, 2), (1, 0)], "hidden_cosine": [(1, 2)]}
LOSSES = [
    {"type": "forward_kl"},
    {"type": "hidden_mse", "weight": 0.3, "layers": [[0, 2], [-1, 0]]},
    {"type": "hidden_cosine", "weight": 0.7, "layers": "last"},
]


def teacher(width=48):
    return tiny_model("gemma2", seed=5, hidden_size=width, num_hidden_layers=3)


def make(student=None, teacher_model=None, data=None, **options):
    options = {"losses": LOSSES, "optim": "sgd", **options}
    return distill(student, teacher_model or teacher(), data or completions(4), **options)


def logits_and_states(model, **inputs):
    """Of a plain model: logits, and what each block returns."""
    states = []
    hooks = [
        block.register_forward_hook(lambda _, i, out: states.append(out[0] if isinstance(out, tuple) else out))
        for block in decoder_layers(model)[1]
    ]
    logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    return logits, states


def by_hand(student, teacher_model, projectors, rows, temperature=1.0):
    """(loss, values by type), of rows one by one, in fp64."""
    sums, count = {"forward_kl": 0.0, "hidden_mse": 0.0, "hidden_cosine": 0.0}, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        keep = shift_labels_of(labels)[0] != -100
        count += int(keep.sum())
        own, own_states = logits_and_states(student, input_ids=ids)
        with torch.no_grad():
            other, other_states = logits_and_states(teacher_model, input_ids=ids)
        sums["forward_kl"] += divergence_by_hand(own[0, keep], other[0, keep], "forward_kl", temperature).sum()
        for kind, pairs in PAIRS.items():
            for i, j in pairs:
                h, t = own_states[i][0, keep], other_states[j][0, keep]
                if projectors:
                    h = h @ projectors[f"{kind}_{i}_{j}"].T
                each = (h - t).pow(2).mean(-1) if kind == "hidden_mse" else 1 - F.cosine_similarity(h, t)
                sums[kind] += each.sum() / len(pairs)
    values = {name: value / count for name, value in sums.items()}
    values["forward_kl"] = values["forward_kl"] * temperature**2
    return values["forward_kl"] + 0.3 * values["hidden_mse"] + 0.7 * values["hidden_cosine"], values


CASES = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "padding-free": {"padding_free": True, "max_length": None},
    "equal widths": {"width": 32},
    "temperature": {"kd_temperature": 2.0},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_loss_and_every_gradient_equal_plain_torch(options):
    options = dict(options)
    student, other = tiny_model(), teacher(options.pop("width", 48))
    plain, plain_teacher = double_copy(student), double_copy(other)
    trainer = make(student, other, max_steps=1, learning_rate=0.0, **options)
    captured = capture_gradients(trainer)
    projectors = {
        name.removeprefix("projectors.").removesuffix(".weight"): p.detach().double().requires_grad_()
        for name, p in trainer.loss_state.hidden.named_parameters()
    }
    assert len(projectors) == (0 if "equal widths" in CASES and other.config.hidden_size == 32 else 3)
    trainer.train()
    rows = trainer.train_dataset
    loss, values = by_hand(plain, plain_teacher, projectors, rows, options.get("kd_temperature", 1.0))
    logs = trainer.state.log_history[0]
    assert logs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, value in values.items():
        assert logs[f"loss/{name}"] == pytest.approx(value.item(), rel=1e-5), name
    loss.backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    want |= {f"projectors.{name}.weight": p.grad for name, p in projectors.items()}
    assert_same_gradients(captured, want)


def test_lora_students_with_frozen_weights_below():
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, layers_to_transform=[1])
    student = tiny_model()
    trainer = make(student, max_steps=1, learning_rate=0.0, peft_config=config)
    captured = capture_gradients(trainer)
    trainer.train()
    assert any("lora_B" in name and g.abs().sum() > 0 for name, g in captured.items())
    assert captured["projectors.hidden_mse_0_2.weight"].abs().sum() > 0  # nothing below it is trained
    plain = double_copy(tiny_model())
    projectors = {n.split(".")[1]: p.detach().double() for n, p in trainer.loss_state.hidden.named_parameters()}
    loss, _ = by_hand(plain, double_copy(teacher()), projectors, trainer.train_dataset)
    assert logged(trainer)[0] == pytest.approx(loss.item(), rel=1e-5)


def test_projectors_are_trained_saved_apart_and_resumed_exactly(tmp_path):
    options = {
        "losses": LOSSES, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch",
        "max_grad_norm": 0.5, "taid": {"alpha": 0.9, "beta": 0.5}, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2, "schedules": {"temperature": {"to": 3.0}, "hidden_mse_weight": {"to": 0.0}},
    }  # fmt: skip
    whole = make(data=completions(24), output_dir=str(tmp_path), **options)
    before = {name: p.clone() for name, p in whole.loss_state.hidden.named_parameters()}
    trained(whole).save_model(str(tmp_path / "final"))
    resumed = make(data=completions(24), output_dir=str(tmp_path / "b"), **options)
    trained(resumed, str(tmp_path / "checkpoint-3"))
    for name, p in resumed.loss_state.hidden.named_parameters():
        assert torch.equal(p, dict(whole.loss_state.hidden.named_parameters())[name])
        assert not torch.equal(p, before[name])
    for got, want in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, want)
    for name in ("schedule/temperature", "schedule/hidden_mse_weight", "schedule/teacher_share", "kd_loss"):
        assert logged(resumed, name)[3:] == logged(whole, name)[3:]
    assert resumed.loss_state.share.state() == whole.loss_state.share.state()
    shares = logged(whole, "schedule/teacher_share")[3:]
    assert all(share > 0.4 + 0.6 * step / 6 for share, step in zip(shares, (3, 4, 5), strict=True))  # it did adapt
    for folder in ("checkpoint-3", "final"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as weights:
            assert set(weights.keys()) == set(tiny_model().state_dict())
    assert not Path(tmp_path, "final", "hidden_projectors.safetensors").exists()


def test_a_checkpoint_without_or_with_damaged_state_is_refused(tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "taid": {}}
    make(output_dir=str(tmp_path), **options).train()
    checkpoint = tmp_path / "checkpoint-1"

    projectors, state = checkpoint / "hidden_projectors.safetensors", checkpoint / "loss_state.json"

    def refused(message):
        with pytest.raises(CorruptError, match=message):
            make(output_dir=str(tmp_path / "again"), **options).train(resume_from_checkpoint=str(checkpoint))

    whole = projectors.read_bytes()
    projectors.write_bytes(b"\x09")
    refused("hidden_projectors.safetensors has 1 bytes")
    projectors.unlink()
    refused("hidden_projectors.safetensors is missing")
    projectors.write_bytes(whole)
    state.write_text("{}")
    refused("loss_state.json has 2 bytes")


def test_the_best_model_comes_with_its_projectors(tmp_path):
    trainer = make(
        eval_data=completions(4, 3), output_dir=str(tmp_path), max_steps=3, learning_rate=0.1, optim="adamw_torch",
        load_best_model_at_end=True, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    assert logged(trainer, "eval_loss")[2] < 0.99 * trainer.state.best_metric


def test_the_projectors_gradients_are_clipped_and_start_anew_each_step():
    trainer = make(max_steps=3, learning_rate=1e-3, max_grad_norm=1e-3, data=completions(12))
    captured = capture_gradients(trainer)
    trainer.train()
    norm = torch.stack([g.norm() for name, g in captured.items() if name.startswith("projectors.")]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert all(p.grad is None or not p.grad.any() for p in trainer.loss_state.hidden.parameters())


@pytest.mark.parametrize(
    "student_layers, teacher_layers, pairs",
    [
        (2, 6, [(0, 2), (1, 5)]),
        (3, 3, [(0, 0), (1, 1), (2, 2)]),
        (4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
    ],
)
def test_the_uniform_layout(student_layers, teacher_layers, pairs):
    models = [tiny_model(num_hidden_layers=n) for n in (student_layers, teacher_layers)]
    losses = HiddenLosses([LossTerm("hidden_mse")], *models)
    assert [(p.student, p.teacher) for p in losses._pairs["hidden_mse"]] == pairs
    assert not list(losses.parameters())


def test_a_projector_on_demand_changes_nothing_at_first():
    without, asked = ([{"type": "hidden_mse", **extra}] for extra in ({}, {"projector": True}))
    logs = []
    for losses in (without, asked):
        trainer = make(teacher_model=teacher(32), losses=losses, max_steps=2, learning_rate=0.1)
        assert len(list(trainer.loss_state.hidden.parameters())) == (2 if losses is asked else 0)
        logs.append(logged(trained(trainer)))
    assert logs[0][0] == pytest.approx(logs[1][0], rel=1e-6) and logs[0][1] != logs[1][1]


@pytest.mark.parametrize(
    "layers, message",
    [
        ([[2, 0]], "layers names block 2 of the student, which has 2: 0 to 1, or -2 to -1"),
        ([[0, -4]], "layers names block -4 of the teacher, which has 3"),
        ([[1, 1], [-1, 1]], "layers names a pair twice"),
    ],
)
def test_blocks_that_are_not_there(layers, message):
    with pytest.raises(ConfigError, match=message):
        make(losses=[{"type": "hidden_mse", "layers": layers}])


def test_what_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="galore_adamw_layerwise updates the student in its backward"):
        make(optim="galore_adamw_layerwise", optim_target_modules="all-linear")
    with pytest.raises(ConfigError, match="torch_compile fixes the loss in its graph"):
        make(torch_compile=True)
    with pytest.raises(ConfigError, match="learn projectors, which the trainer would neither train nor save"):
        with_callback(teacher(48), LOSSES)
    trainer = make(max_steps=1)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(trainer.model.parameters()))
    with pytest.raises(ConfigError, match="a learning-rate scheduler made before the projectors"):
        trainer.train()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(ConfigError, match="not with FSDP1 or models split over devices. Use DDP, FSDP2 or Deep"):
        LossState(trainer, trainer.args.loss_plan())
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", True)
    with pytest.raises(ConfigError, match="next to a student that FSDP shards: .* name it in optim; one was given"):
        LossState(trainer, trainer.args.loss_plan())
    trainer.optimizer, trainer.args.optim = None, "adafactor"
    with pytest.raises(ConfigError, match="one of torch's optimizers, such as adamw_torch; got optim=adafactor"):
        LossState(trainer, trainer.args.loss_plan())
    trainer.args.fp16 = True
    with pytest.raises(ConfigError, match="fp16 scales the gradients of both"):
        LossState(trainer, trainer.args.loss_plan())
    monkeypatch.setattr(trainer, "is_fsdp_enabled", False)
    monkeypatch.setattr(trainer, "teaching", CachedTeacher.__new__(CachedTeacher))
    with pytest.raises(ConfigError, match="need one teacher whose model is in this process, got 0"):
        LossState(trainer, trainer.args.loss_plan())


def with_callback(teacher_model, losses, **options):
    """The logs of a stock Trainer's training, on the rows that LigerDistillTrainer prepares."""
    rows = make(teacher_model=teacher(32), losses=[{"type": "ce"}]).train_dataset
    rows = rows.select_columns(["input_ids", "labels"])
    args = train_args(TrainingArguments, max_steps=1, optim="sgd", learning_rate=0.0, remove_unused_columns=False)
    trainer = Trainer(
        tiny_model(), args, DataCollatorForLanguageModeling(pad_token_id=tiny_tokenizer().pad_token_id), rows,
        processing_class=tiny_tokenizer(), callbacks=[DistillationCallback(teacher_model, losses=losses, **options)],
    )  # fmt: skip
    return trained(trainer).state.log_history[0]


def test_the_callback_learns_the_same():
    options = {"schedules": {"hidden_mse_weight": {"from": 0.1, "to": 1.0}}, "taid": {"adaptive": False}}
    got = with_callback(teacher(32), LOSSES, **options)
    want = trained(make(teacher_model=teacher(32), max_steps=1, learning_rate=0.0, **options)).state.log_history[0]
    names = [name for name in want if name.startswith(("loss", "schedule/"))]
    assert {"loss", "loss/hidden_mse", "loss/hidden_cosine", "schedule/teacher_share"} <= set(names)
    for name in names:
        assert got[name] == pytest.approx(want[name], rel=1e-5), name


class HookedInside(torch.nn.Linear):
    """A block whose checkpoint takes its hooks in, as in some releases of transformers."""

    def __call__(self, x):
        return self.run(super().__call__, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_blocks_hooks_keeps_the_graph(reentrant):
    blocks, states = torch.nn.ModuleList([HookedInside(4, 4), HookedInside(4, 4)]), {}
    for block in blocks:
        block.run = partial(checkpoint, use_reentrant=reentrant)
    x = torch.randn(3, 4, requires_grad=True)
    with _recorded(blocks, {0}, states):
        output = blocks[1](blocks[0](x))
    assert not blocks[0]._forward_hooks
    (output.sum() + 2 * states[0].sum()).backward()
    want = (blocks[1].weight.sum(0) + 2) @ blocks[0].weight
    torch.testing.assert_close(x.grad, want.expand(3, 4))
    assert states[0].requires_grad
