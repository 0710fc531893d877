"""The optimizer in one launch trains as torch's fused AdamW with Trainer's clipping, and yields where it can't."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from tiny import tiny_model
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from trainings import distill, logged, sft, trained, weights_of
from transformers import TrainerCallback

from liger_trainer import LigerTrainer
from liger_trainer.trainers import one_launch_adamw as adamw
from liger_trainer.trainers.finite_guard import innermost
from liger_trainer.trainers.one_launch_adamw import OneLaunchAdamW

RUN: dict[str, Any] = {
    "max_steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05,
    "adam_epsilon": 1e-2,  # so large that the scale of gradients matters, which clipping changes
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Without a GPU, too: there the op runs in torch, or in Triton's interpreter."""
    monkeypatch.setattr(adamw, "_are_plain", lambda params: True)


def with_torch(monkeypatch) -> None:
    monkeypatch.setattr(adamw, "_are_plain", lambda params: False)


def ended(trainer, kind: type, resume=None) -> dict[str, torch.Tensor]:
    """The weights after a training by this optimizer, with the norms that it logged."""
    norms = logged(trained(trainer, resume), "grad_norm")
    assert type(innermost(trainer.optimizer)) is kind
    return {**weights_of(trainer), "norms": torch.tensor(norms)}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def with_projectors(**options):
    """The clipping of the student's gradients does not touch theirs."""
    losses = [{"type": "forward_kl"}, {"type": "hidden_mse", "layers": "last"}]
    return distill(teacher=tiny_model(seed=1, hidden_size=48), losses=losses, **options)


@pytest.mark.parametrize(
    ("make", "most"), [(sft, 0.05), (sft, 0.0), (sft, 1e9), (distill, 0.05), (with_projectors, 0.05)]
)
def test_as_torch(monkeypatch, make, most):
    got = ended(make(**{**RUN, "max_grad_norm": most}), OneLaunchAdamW)
    with_torch(monkeypatch)
    expected = ended(make(**{**RUN, "max_grad_norm": most}), AdamW)
    assert len(expected["norms"]) == RUN["max_steps"]
    assert_same(got, expected)


class Looks(TrainerCallback):
    def __init__(self):
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model: Any = None, **kwargs):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())


def test_somebody_else_sees_clipped_gradients(monkeypatch):
    looks = Looks()
    got = ended(sft(callbacks=[looks], **RUN), OneLaunchAdamW)
    assert looks.norms == pytest.approx([0.05] * RUN["max_steps"], rel=1e-3)
    with_torch(monkeypatch)
    assert_same(got, ended(sft(**RUN), AdamW))


class Monitors(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        pass


class Wrapper:
    """An optimizer around another, as one that perturbs weights is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def overriding(name: str):
    return lambda trainer, *_: setattr(
        trainer, "__class__",
        type("Reads", (LigerTrainer,), {name: lambda self, *args: getattr(LigerTrainer, name)(self, *args)}),
    )  # fmt: skip


WATCHERS: dict[str, Any] = {  # each is given the trainer, its optimizer, and what undoes things after the test
    "callback": lambda trainer, *_: trainer.add_callback(Monitors()),
    "pre-hook": lambda _, optimizer, __: optimizer.register_step_pre_hook(lambda *_: None),
    "post-hook": lambda _, optimizer, __: optimizer.register_step_post_hook(lambda *_: None),
    "any optimizer's hook": lambda *of: of[2](register_optimizer_step_pre_hook(lambda *_: None).remove),
    "any optimizer's post-hook": lambda *of: of[2](register_optimizer_step_post_hook(lambda *_: None).remove),
    "wrapper": lambda trainer, *_: setattr(trainer, "optimizer", Wrapper(trainer.optimizer)),
    "_clip_grad_norm": overriding("_clip_grad_norm"),
    "_get_grad_norm": overriding("_get_grad_norm"),
    "clipping": lambda trainer, *_: setattr(trainer.accelerator, "clip_grad_norm_", lambda *_: None),
    "fp16": lambda trainer, *_: setattr(trainer.accelerator, "scaler", object()),
    "nobody": lambda *_: None,
}


@pytest.mark.parametrize("who", WATCHERS)
def test_clipping_is_trainers_where_somebody_watches(who, request):
    trainer = sft(**RUN)
    optimizer = innermost(trainer.create_optimizer())
    for param in trainer.model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.coefficient = torch.tensor(0.5)  # of a step that was interrupted
    WATCHERS[who](trainer, optimizer, request.addfinalizer)
    trainer._clip_grad_norm(trainer.model)  # as Trainer's step does
    assert (optimizer.coefficient is None) is (who != "nobody")
    by_trainer = who not in ("nobody", "clipping")
    assert bool((trainer.model.lm_head.weight.grad < 1).all()) is by_trainer


@pytest.mark.parametrize(("first", "then"), [(OneLaunchAdamW, AdamW), (AdamW, OneLaunchAdamW)])
def test_checkpoints_are_torchs(monkeypatch, tmp_path, first, then):
    def run(kind, resume=None, **more):
        with monkeypatch.context() as patch:
            if kind is AdamW:
                with_torch(patch)
            return ended(sft(**{**RUN, "lr_scheduler_type": "constant", **more}), kind, resume)

    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    run(first, **saving, max_steps=2)
    got, expected = run(then, True, **saving), run(then)
    assert_same({**got, "norms": got["norms"][-2:]}, {**expected, "norms": expected["norms"][-2:]})


# The optimizer by itself


def one_parameter(kind: type = OneLaunchAdamW, **options) -> tuple[torch.nn.Parameter, Any]:
    param = torch.nn.Parameter(torch.ones(5))
    return param, kind([param], lr=0.1, fused=True, **options)


def test_a_step_that_is_not_finite_is_left_out():
    param, optimizer = one_parameter()
    for found, moved in ((0.0, True), (1.0, False), (0.0, True)):
        before, param.grad = param.detach().clone(), torch.full((5,), torch.nan if found else 1.0)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert torch.equal(before, param) is not moved
        assert param.isfinite().all()
    assert optimizer.state[param]["step"].item() == 2


@pytest.mark.parametrize("how", ["amsgrad", "maximize", "a scale of fp16"])
def test_what_is_rare_is_torchs(how):
    scaled = how == "a scale of fp16"
    options = {} if scaled else {how: True}
    (ours, one), (theirs, other) = one_parameter(**options), one_parameter(AdamW, **options)
    for step in range(3):
        ours.grad = torch.arange(5.0) + step
        theirs.grad = ours.grad * (1.0 if scaled else 0.5)
        if scaled:
            for optimizer in (one, other):
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        else:
            one.coefficient = torch.tensor(0.5)
        one.step()
        other.step()
    assert torch.equal(ours, theirs) and one.coefficient is None


def test_a_step_without_gradients_of_a_state_that_is_not_fused_does_nothing():
    """As after a checkpoint of `optim: adamw_torch`, where a step that is not finite has its gradients dropped."""
    param, optimizer = one_parameter()
    optimizer.param_groups[0]["fused"] = False
    optimizer.coefficient = torch.tensor(0.5)
    optimizer.step()
    assert torch.equal(param, torch.ones(5)) and optimizer.coefficient is None


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_run_once_a_step(fused):
    one_parameter(AdamW)  # of which torch hooks the class's step
    (param, optimizer), calls = one_parameter(), []
    optimizer.param_groups[0]["fused"] = fused
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    param.grad = torch.ones(5)
    optimizer.step()
    assert calls == ["before", "after"] and not torch.equal(param, torch.ones(5))


# Whose it is

AMSGRAD = {"optimizer_cls_and_kwargs": (AdamW, {"lr": 0.1, "fused": True, "amsgrad": True})}


def test_others_stay(monkeypatch):
    """Where others were asked for or given, FSDP1 flattens weights, or no kernel runs."""
    kinds = [({}, OneLaunchAdamW), ({"optim": "adamw_torch"}, AdamW), ({"optim": "sgd"}, SGD), (AMSGRAD, AdamW)]
    for options, kind in kinds:
        assert type(sft(**options).create_optimizer()) is kind
    model = tiny_model("llama")
    given = AdamW(model.parameters(), lr=1e-2, fused=True)
    assert innermost(trained(sft(model, **RUN, optimizers=(given, None))).optimizer) is given
    trainer = sft()
    with monkeypatch.context() as sharded:
        sharded.setattr(trainer.accelerator.state, "distributed_type", DistributedType.FSDP)
        sharded.setattr(trainer.accelerator.state, "fsdp_plugin", SimpleNamespace(fsdp_version=1), raising=False)
        assert type(trainer.create_optimizer()) is AdamW
    with_torch(monkeypatch)
    assert type(sft().create_optimizer()) is AdamW


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
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, OneLaunchAdamW), (torch.float64, AdamW)])
def test_a_training_on_a_gpu_has_it_where_its_kernel_runs(monkeypatch, dtype, kind):
    """In fp64 our op would take its time in torch, parameter by parameter."""
    monkeypatch.undo()
    trainer = trained(sft(tiny_model(dtype=dtype), use_cpu=False, max_steps=1))
    assert type(innermost(trainer.optimizer)) is kind
