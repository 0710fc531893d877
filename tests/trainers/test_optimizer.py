"""The optimizer in one launch trains as torch's fused AdamW with Trainer's clipping, and yields where it can't."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import TrainerCallback

from liger_trainer import LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.trainers import one_launch_adamw as adamw
from liger_trainer.trainers.finite_guard import innermost
from liger_trainer.trainers.one_launch_adamw import OneLaunchAdamW, OneLaunchStep

RUN: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Without a GPU, too: there the op runs in torch, or in Triton's interpreter."""
    monkeypatch.setattr(adamw, "_are_plain", lambda params: True)


def sft(callbacks=None, **options) -> LigerTrainer:
    return LigerTrainer(
        tiny_model("llama"), train_args(LigerConfig, **{**RUN, **options}), train_dataset=completions(),
        processing_class=tiny_tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def distill(**options) -> LigerDistillTrainer:
    return LigerDistillTrainer(
        tiny_model("llama"), tiny_model("llama", seed=1), train_args(LigerDistillConfig, **{**RUN, **options}),
        train_dataset=completions(), processing_class=tiny_tokenizer(),
    )  # fmt: skip


def with_torch(monkeypatch) -> None:
    monkeypatch.setattr(adamw.OneLaunchStep, "of", lambda self, optimizer: optimizer)


def trained(trainer, kind: type, **options) -> dict[str, torch.Tensor]:
    """The weights after a training by this optimizer, with the norms that it logged."""
    trainer.train(**options)
    assert type(innermost(trainer.optimizer)) is kind
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: p.detach().cpu() for name, p in trainer.model.named_parameters()} | {"norms": torch.tensor(norms)}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("make", [sft, distill])
@pytest.mark.parametrize("most", [0.05, 0.0, 1e9])
def test_as_torch(monkeypatch, make, most):
    got = trained(make(max_grad_norm=most), OneLaunchAdamW)
    with_torch(monkeypatch)
    expected = trained(make(max_grad_norm=most), AdamW)
    assert len(expected["norms"]) == RUN["max_steps"]
    assert_same(got, expected)


def test_clipping_matters_here(monkeypatch):
    """What the comparison above would miss if the coefficient were left out."""
    clipped, loose = (trained(sft(max_grad_norm=most, adam_epsilon=1e-2), OneLaunchAdamW) for most in (0.05, 0.0))
    assert not torch.allclose(clipped["lm_head.weight"], loose["lm_head.weight"], atol=1e-4)


def test_projectors_are_clipped_by_themselves(monkeypatch):
    """The clipping of the student's gradients leaves theirs alone."""
    losses = [{"type": "forward_kl"}, {"type": "hidden_mse", "layers": "last"}]

    def make():
        return LigerDistillTrainer(
            tiny_model("llama"), tiny_model("llama", seed=1, hidden_size=48),
            train_args(LigerDistillConfig, **RUN, losses=losses, max_grad_norm=0.05, adam_epsilon=1e-2),
            train_dataset=completions(), processing_class=tiny_tokenizer(),
        )  # fmt: skip

    got = trained(make(), OneLaunchAdamW)
    with_torch(monkeypatch)
    assert_same(got, trained(make(), AdamW))


class Looks(TrainerCallback):
    def __init__(self):
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model: Any = None, **kwargs):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())


def test_somebody_else_sees_clipped_gradients(monkeypatch):
    looks = Looks()
    got = trained(sft(callbacks=[looks], max_grad_norm=0.05), OneLaunchAdamW)
    assert looks.norms == pytest.approx([0.05] * RUN["max_steps"], rel=1e-3)
    with_torch(monkeypatch)
    assert_same(got, trained(sft(max_grad_norm=0.05), AdamW))


class Monitors(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        pass


class Wrapper:
    """An optimizer around another, as one that perturbs weights is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def watch(trainer, who: str, finalizer) -> None:
    optimizer = innermost(trainer.optimizer)
    if who == "callback":
        trainer.add_callback(Monitors())
    elif who == "pre-hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    elif who == "post-hook":
        optimizer.register_step_post_hook(lambda *_: None)
    elif who == "any optimizer's hook":
        finalizer(register_optimizer_step_pre_hook(lambda *_: None).remove)
    elif who == "any optimizer's post-hook":
        finalizer(register_optimizer_step_post_hook(lambda *_: None).remove)
    elif who == "wrapper":
        trainer.optimizer = Wrapper(trainer.optimizer)
    elif who in ("_clip_grad_norm", "_get_grad_norm"):
        trainer.__class__ = type("Reads", (type(trainer),), {who: lambda *_: None})
    elif who == "clipping":
        trainer.accelerator.clip_grad_norm_ = lambda *_: None
    elif who == "fp16":
        trainer.accelerator.scaler = object()


@pytest.mark.parametrize(
    "who",
    [
        "callback", "pre-hook", "post-hook", "any optimizer's hook", "any optimizer's post-hook", "wrapper",
        "_clip_grad_norm", "_get_grad_norm", "clipping", "fp16", "",
    ],
)  # fmt: skip
def test_clipping_is_trainers_where_somebody_watches(who, request):
    trainer = sft(max_grad_norm=0.05)
    optimizer = innermost(trainer.create_optimizer())
    for param in trainer.model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.coefficient = torch.tensor(0.5)  # of a step that was interrupted
    watch(trainer, who, request.addfinalizer)
    norm = adamw.OneLaunchStep(trainer).norm_before_step(trainer.model)
    assert (norm is None) is (optimizer.coefficient is None) is bool(who)


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "torch's first"])
def test_checkpoints_are_torchs(monkeypatch, tmp_path, first):
    options = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_grad_norm": 0.05,
        "lr_scheduler_type": "constant",
    }
    with monkeypatch.context() as patch:
        if not first:
            with_torch(patch)
        trained(sft(**options, max_steps=2), OneLaunchAdamW if first else AdamW)
    if first:
        with_torch(monkeypatch)
    trainer = sft(**options)
    got = trained(trainer, AdamW if first else OneLaunchAdamW, resume_from_checkpoint=True)
    expected = trained(sft(max_grad_norm=0.05, lr_scheduler_type="constant"), AdamW if first else OneLaunchAdamW)
    assert_same({**got, "norms": got["norms"][-2:]}, {**expected, "norms": expected["norms"][-2:]})


def test_a_step_that_is_not_finite_is_left_out():
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = OneLaunchAdamW([param], lr=0.1, fused=True)
    for found, moved in ((0.0, True), (1.0, False), (0.0, True)):
        before, param.grad = param.detach().clone(), torch.full((5,), torch.nan if found else 1.0)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert torch.equal(before, param) is not moved
        assert param.isfinite().all()
    assert optimizer.state[param]["step"].item() == 2


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_rare_options_are_torchs(option):
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    one, other = (
        kind([p], lr=0.1, fused=True, **{option: True}) for kind, p in ((OneLaunchAdamW, ours), (AdamW, theirs))
    )
    for step in range(3):
        ours.grad = torch.arange(5.0) + step
        theirs.grad = ours.grad * 0.5
        one.coefficient = torch.tensor(0.5)
        one.step()
        other.step()
    assert torch.equal(ours, theirs) and one.coefficient is None


def test_a_step_without_gradients_of_a_state_that_is_not_fused_does_nothing():
    """As after a checkpoint of `optim: adamw_torch`, where a step that is not finite has its gradients dropped."""
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = OneLaunchAdamW([param], lr=0.1, fused=True)
    optimizer.param_groups[0]["fused"] = False
    optimizer.coefficient = torch.tensor(0.5)
    optimizer.step()
    assert torch.equal(param, torch.ones(5)) and optimizer.coefficient is None


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_run_once_a_step(fused):
    AdamW([torch.nn.Parameter(torch.ones(5))])  # of which torch hooks the class's step
    param = torch.nn.Parameter(torch.ones(5))
    optimizer, calls = OneLaunchAdamW([param], lr=0.1, fused=True), []
    optimizer.param_groups[0]["fused"] = fused
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    param.grad = torch.ones(5)
    optimizer.step()
    assert calls == ["before", "after"] and not torch.equal(param, torch.ones(5))


def test_a_scale_of_fp16_is_torchs():
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    one, other = OneLaunchAdamW([ours], lr=0.1, fused=True), AdamW([theirs], lr=0.1, fused=True)
    for optimizer, param in ((one, ours), (other, theirs)):
        param.grad = torch.arange(5.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        optimizer.step()
    assert torch.equal(ours, theirs)


def test_others_stay():
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(distributed_type=adamw.DistributedType.NO), get_tp_size=lambda: 1
    )
    param = torch.nn.Parameter(torch.ones(5))
    for optimizer in (AdamW([param]), AdamW([param], fused=True, amsgrad=True), torch.optim.SGD([param])):
        assert OneLaunchStep(trainer).of(optimizer) is optimizer
    fused = AdamW([{"params": [param], "weight_decay": 0.5}], lr=0.2, fused=True)
    ours = OneLaunchStep(trainer).of(fused)
    assert type(ours) is OneLaunchAdamW and ours.state_dict() == fused.state_dict()
    trainer.accelerator.distributed_type = adamw.DistributedType.FSDP
    assert OneLaunchStep(trainer).of(fused) is fused


def test_where_no_kernel_runs_torchs_stays(monkeypatch):
    """Without a compiler for Triton, say, or in fp64: our op would take its time in torch, parameter by parameter."""
    monkeypatch.undo()
    on_gpu: Any = type("P", (), {"device": torch.device("cuda:0"), "is_cuda": True})
    monkeypatch.setattr(adamw, "nn", SimpleNamespace(Parameter=on_gpu))
    for runs in (False, True):
        monkeypatch.setattr(adamw, "use_triton", lambda p, runs=runs: runs)
        assert adamw._are_plain([on_gpu(), on_gpu()]) is runs
    assert not adamw._are_plain([])


def test_a_given_optimizer_stays():
    model = tiny_model("llama")
    given = AdamW(model.parameters(), lr=1e-2, fused=True)
    trainer = LigerTrainer(
        model, train_args(LigerConfig, **RUN), train_dataset=completions(), processing_class=tiny_tokenizer(),
        optimizers=(given, None),
    )  # fmt: skip
    trainer.train()
    assert innermost(trainer.optimizer) is given


@pytest.mark.gpu
def test_the_host_never_waits_for_a_step():
    params = [torch.nn.Parameter(torch.randn(40, 30, device="cuda")) for _ in range(20)]
    optimizer = OneLaunchAdamW(params, lr=0.1, fused=True)
    for step in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            norm = adamw.gradient_norm([param.grad for param in params])
            optimizer.coefficient, optimizer.found_inf = (1.0 / norm).clamp(max=1.0), torch.zeros((), device="cuda")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_training_on_a_gpu_has_it(monkeypatch):
    monkeypatch.undo()
    trainer = sft(use_cpu=False, max_steps=1)
    trainer.train()
    assert type(innermost(trainer.optimizer)) is OneLaunchAdamW
