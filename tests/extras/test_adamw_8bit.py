"""`optim: adamw_8bit`: trains as AdamW, resumes bit for bit, and takes the states of other libraries."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model
from trainings import logged, sft, trained, weights_of

from liger_trainer.errors import ConfigError
from liger_trainer.extras import adamw_8bit
from liger_trainer.extras.adamw_8bit import WRAPPED, OneLaunchAdamW8bit
from liger_trainer.kernels.eight_bits import decoded_reference, encoded_reference
from liger_trainer.trainers.finite_guard import drops_on_device, innermost

RUN: dict[str, Any] = {
    "optim": "adamw_8bit", "max_steps": 4, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "lr_scheduler_type": "constant",
}  # fmt: skip
BY_CHANCE = {"optim_args": "bf16_stochastic_round=true"}


def wide_model(dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model("llama", dtype=dtype, hidden_size=64, intermediate_size=96)


def test_it_trains_as_adamw_in_32_bits():
    trainers = [trained(sft(wide_model(), **{**RUN, "optim": name})) for name in ("adamw_bnb_8bit", "adamw_torch")]
    assert type(innermost(trainers[0].optimizer)) is OneLaunchAdamW8bit
    assert drops_on_device(trainers[0].optimizer)
    assert logged(trainers[0]) == pytest.approx(logged(trainers[1]), rel=2e-3)
    assert logged(trainers[0], "grad_norm") == pytest.approx(logged(trainers[1], "grad_norm"), rel=2e-2)
    bits = {
        name: state["state1"].dtype
        for name, p in trainers[0].model.named_parameters() for state in [innermost(trainers[0].optimizer).state[p]]
    }  # fmt: skip
    assert bits["model.layers.0.mlp.up_proj.weight"] is torch.uint8
    assert bits["model.embed_tokens.weight"] is bits["model.norm.weight"] is torch.float32


def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path):
    def run(resume=None, **more) -> Any:
        return trained(sft(wide_model(torch.bfloat16), **{**RUN, **BY_CHANCE, **more}), resume)

    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    run(**saving, max_steps=2)
    resumed, whole = run(True, **saving), weights_of(run())
    assert all(torch.equal(x, whole[name]) for name, x in weights_of(resumed).items())


def test_by_chance_weights_move_by_updates_below_half_of_their_last_digit():
    start = {name: p.detach().clone() for name, p in wide_model(torch.bfloat16).named_parameters()}
    moved = {}
    for args in ({}, BY_CHANCE):
        trainer = trained(
            sft(wide_model(torch.bfloat16), **{**RUN, **args, "learning_rate": 1e-5, "weight_decay": 0.0})
        )
        new = weights_of(trainer)
        moved[bool(args)] = [int((new[name] != x).sum()) for name, x in start.items() if x.ndim == 2]
    assert sum(moved[True]) > 5 * sum(moved[False]) > 0


@pytest.mark.parametrize(
    ("options", "dtype", "said"),
    [({"optim_args": "bf16_stochastic_rounding=true"}, torch.bfloat16, "bf16_stochastic_round=true or false"),
     (BY_CHANCE, torch.float32, "no effect")],
)  # fmt: skip
def test_wrong_options_are_refused(options, dtype, said):
    with pytest.raises(ConfigError, match=f"optim_args: .*{said}"):
        sft(wide_model(dtype), **RUN, **options).create_optimizer()


def test_who_has_it(monkeypatch):
    trainer = sft(wide_model(), **RUN)
    with monkeypatch.context() as patch:
        patch.setattr(adamw_8bit, "WHOLE", ())  # as of DeepSpeed: the library's own
        if not find_spec("bitsandbytes"):
            with pytest.raises(ImportError, match="bitsandbytes"):
                trainer.create_optimizer()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", True)
    with pytest.raises(ConfigError, match="adamw_8bit needs all weights on each GPU"):
        trainer.create_optimizer()


# The optimizer by itself


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape)) for shape in ((64, 65), (7,), (80, 64), (70, 64))]


def optimizer_of(params: list[torch.nn.Parameter], **options: Any) -> OneLaunchAdamW8bit:
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return OneLaunchAdamW8bit(groups, lr=1e-2, in_32_bits=[params[3]], **options)


def step(optimizer: OneLaunchAdamW8bit, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = scale * torch.randn(p.shape, generator=generator)
    optimizer.step()


def stepped(count: int = 2) -> tuple[list[torch.nn.Parameter], OneLaunchAdamW8bit]:
    optimizer = optimizer_of(params := parameters())
    for seed in range(count):
        step(optimizer, seed)
    return params, optimizer


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """As bitsandbytes had it before it wrapped tensors."""
    states = {i: {"step": x["step"], **x[WRAPPED]} for i, x in state["state"].items()}
    return {**state, "state": states}


def torchaos(state: dict[str, Any]) -> dict[str, Any]:
    def one(x: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"step": torch.tensor(float(x["step"]))}
        for i, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
            made[name] = x[f"state{i}"]
            if f"absmax{i}" in x:
                codes, scale, qmap = x[f"state{i}"], x[f"absmax{i}"], x[f"qmap{i}"]
                made[name] = SimpleNamespace(codes=codes, scale=scale, qmap=qmap.clone(), signed=i == 1)
        return made

    groups = [
        {"params": group["params"], "lr": torch.tensor(group["lr"]), "betas": group["betas"], "eps": group["eps"],
         "weight_decay": group["weight_decay"], "amsgrad": False}
        for group in state["param_groups"]
    ]  # fmt: skip
    return {"state": {i: one(x) for i, x in flat(state)["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("form", [lambda state: state, flat, torchaos], ids=["wrapped", "flat", "torchao"])
def test_states_of_both_libraries_are_loaded(form):
    params, optimizer = stepped()
    there = [torch.nn.Parameter(p.detach().clone()) for p in params]
    state = optimizer.state_dict()
    assert state["state"][0]["step"] == 2 and isinstance(state["state"][0]["step"], int)
    assert set(state["state"][0][WRAPPED]) == {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"}
    assert set(state["state"][1][WRAPPED]) == {"state1", "state2"}
    loaded = optimizer_of(there, seed=5)
    loaded.load_state_dict(form(state))
    assert loaded.param_groups[1]["seed"] == (0 if "seed" in form(state)["param_groups"][1] else 5)
    for each in (optimizer, loaded):
        step(each, 5)
    assert all(map(torch.equal, params, there))
    assert not torch.equal(params[0], parameters()[0])
    other = optimizer_of(parameters())  # a load that is off shows
    other.load_state_dict(state)
    other.state[other.param_groups[0]["params"][0]]["absmax1"] *= 1.01
    other.param_groups[0]["params"][0].data.copy_(stepped()[0][0].data)
    step(other, 5)
    assert not torch.equal(other.param_groups[0]["params"][0], params[0])


def test_moments_of_adamw_in_32_bits_are_put_into_8():
    params = parameters()
    torchs = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=1e-2)
    step(torchs, 0)  # pyright: ignore[reportArgumentType]
    ours = optimizer_of(params)
    ours.load_state_dict(torchs.state_dict())
    state, mean = ours.state[params[0]], torchs.state[params[0]]["exp_avg"]
    assert state["step"].item() == 1 and torch.equal(
        ours.state[params[3]]["state1"], torchs.state[params[3]]["exp_avg"]
    )
    assert torch.equal(state["state1"], encoded_reference(mean, signed=True)[0])
    got = decoded_reference(state["state1"], state["absmax1"], signed=True)
    torch.testing.assert_close(got, mean, rtol=0, atol=0.01 * mean.abs().max().item())
    step(ours, 1)


@pytest.mark.parametrize(("name", "said"), [("qmap1", "a map"), ("absmax2", "another size than 256")])
def test_other_codes_are_refused(name, said):
    _, optimizer = stepped()
    state = optimizer.state_dict()
    wrapped = state["state"][0][WRAPPED]
    wrapped[name] = wrapped[name] * 2 if name == "qmap1" else wrapped[name][:3]
    with pytest.raises(ConfigError, match=said):
        optimizer_of(parameters()).load_state_dict(state)


def test_bitsandbytes_loads_ours_and_steps_as_we_do():
    bnb = pytest.importorskip("bitsandbytes")
    params, optimizer = stepped()
    there = [torch.nn.Parameter(p.detach().clone()) for p in params]
    theirs = bnb.optim.AdamW8bit([{"params": there[:2]}, {"params": there[2:]}], lr=1.0)
    theirs.load_state_dict(optimizer.state_dict())
    for each in (optimizer, theirs):
        step(each, 5)
    for ours, p in zip(params, there, strict=True):
        torch.testing.assert_close(ours, p, rtol=1e-5, atol=1e-6)
    loaded = optimizer_of(there)
    loaded.load_state_dict(theirs.state_dict())
    assert torch.equal(loaded.state[there[0]]["state1"], theirs.state[there[0]]["state1"])
    assert loaded.param_groups[0]["lr"] == 1e-2 and loaded.state[there[0]]["step"].item() == 3
    step(loaded, 6)


def test_clipping_and_a_scale_of_fp16_are_one_factor():
    (params, optimizer), (scaled, other) = stepped(0), stepped(0)
    optimizer.coefficient = torch.tensor(0.5)
    step(optimizer, 0)
    other.grad_scale, other.coefficient = torch.tensor(8.0), torch.tensor(4.0)
    step(other, 0)
    assert all(map(torch.equal, params, scaled)) and other.coefficient is None
    third = stepped(0)
    step(third[1], 0)
    assert torch.equal(optimizer.state[params[0]]["absmax1"], 0.5 * third[1].state[third[0][0]]["absmax1"])


def test_a_step_that_is_not_finite_is_left_out():
    params, optimizer = stepped(1)
    before = [p.detach().clone() for p in params]
    optimizer.found_inf = torch.tensor(1.0)  # pyright: ignore[reportAttributeAccessIssue]
    step(optimizer, 1, torch.nan)
    assert all(map(torch.equal, params, before)) and optimizer.state[params[0]]["step"].item() == 1
    assert optimizer.state[params[0]]["absmax2"].isfinite().all()
