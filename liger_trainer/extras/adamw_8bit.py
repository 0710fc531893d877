"""AdamW with moments in 8 bits, in one launch, whose checkpoints are those of bitsandbytes' AdamW.

It reads the states of torchao's `AdamW8bit` and of torch's AdamW too. Neither library has to be installed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_internals import add_to_all, subtract_from_all
from ..errors import ConfigError
from ..kernels.adamw import ByChance, adamw_
from ..kernels.eight_bits import BLOCK, encoded_reference, maps_on
from ..trainers.host import TrainerHost
from ..trainers.one_launch_adamw import WHOLE, OneLaunchAdamW, params_of

SMALLEST = 4096  # numbers: both libraries keep moments of less in 32 bits
WRAPPED = "__bnb_optimizer_quant_state__"  # around all but the step, so that FSDP does not gather it


class OneLaunchAdamW8bit(OneLaunchAdamW):
    """AdamW whose moments take a byte each and 4 bytes for 256 of them (kernels/eight_bits.py).

    In fp32 are the moments of a parameter of fewer than 4,096 numbers, or with gaps in memory, or `in_32_bits`.

    Args:
        params: parameters or groups of them, whole on each rank.
        lr, betas, eps, weight_decay: those of `torch.optim.AdamW`.
        in_32_bits: parameters whose moments stay in fp32, as those of embeddings do in Trainer.
        bf16_stochastic_round: weights in bf16 are rounded up or down by chance, so that updates below half of their
            last digit are not lost. torchao's name.
        seed: of that chance, the same on all ranks. A checkpoint keeps it.
        floor: see kernels/eight_bits.py; both libraries' own steps are without.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, in_32_bits: Iterable[Tensor] = (), bf16_stochastic_round: bool = False,
        seed: int = 0, floor: bool = True,
    ):  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self._in_32_bits, self._floor = set(map(id, in_32_bits)), floor
        self.defaults |= {"bf16_stochastic_round": bf16_stochastic_round, "seed": seed}
        for group in self.param_groups:
            group |= {name: group.get(name, value) for name, value in self.defaults.items()}

    def leaves_to_torch(self) -> bool:
        return False

    def _update(self, group: dict[str, Any], coefficient: Tensor | None) -> None:
        numbers = {id(p): number for number, p in enumerate(params_of(self))}
        by_bits: dict[bool, list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_bits.setdefault("absmax1" in self._state_of(p), []).append(p)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for eight_bits, params in by_bits.items():
            states, grads = [self.state[p] for p in params], [p.grad for p in params if p.grad is not None]
            steps, means, squares = ([state[name] for state in states] for name in ("step", "state1", "state2"))
            largest = None
            if eight_bits:
                largest = [state["absmax1"] for state in states], [state["absmax2"] for state in states]
            by_chance = ByChance(group["seed"], [numbers[id(p)] for p in params])
            add_to_all(steps, 1)
            adamw_(
                params, grads, means, squares, steps, lr=float(group["lr"]), betas=group["betas"],
                eps=group["eps"], weight_decay=group["weight_decay"], coefficient=coefficient, found_inf=found_inf,
                largest=largest, floor=self._floor, rounding=by_chance if group["bf16_stochastic_round"] else None,
            )  # fmt: skip
            if found_inf is not None:
                subtract_from_all(steps, found_inf)

    def _is_in_8_bits(self, p: Tensor) -> bool:
        return p.numel() >= SMALLEST and id(p) not in self._in_32_bits and p.is_contiguous()

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            eight_bits = self._is_in_8_bits(p)
            for i in (1, 2):
                state[f"state{i}"] = torch.zeros_like(p, dtype=torch.uint8 if eight_bits else torch.float32)
                if eight_bits:
                    state[f"absmax{i}"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as bitsandbytes' AdamW does: steps are numbers, and each tensor of a map is there again."""
        packed = super().state_dict()
        states = packed["state"]
        steps = torch.stack([state["step"] for state in states.values()]).tolist() if states else []
        for (number, state), step in zip(list(states.items()), steps, strict=True):
            wrapped = {name: value for name, value in state.items() if name != "step"}
            if "absmax1" in state:
                maps = maps_on(state["state1"].device)
                wrapped |= {"qmap1": maps[0], "qmap2": maps[1]}
            states[number] = {"step": int(step), WRAPPED: wrapped}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of bitsandbytes', torchao's or torch's AdamW.

        Raises:
            ConfigError: moments in 8 bits of another map, or of blocks of another size than 256.
        """
        groups = [
            {**self.defaults, **group, "lr": float(group["lr"]), "fused": True} for group in state_dict["param_groups"]
        ]
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        places = [place for group in groups for place in group["params"]]
        for place, p in zip(places, params_of(self), strict=True):
            if place in state_dict["state"]:
                self.state[p] = self._loaded(p, state_dict["state"][place])

    def _loaded(self, p: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        saved = {**saved, **saved.get(WRAPPED, {})}
        state = {"step": torch.tensor(float(saved["step"]), device=p.device)}
        for i, (name, map_) in enumerate(zip(("exp_avg", "exp_avg_sq"), maps_on(p.device), strict=True), 1):
            moment = saved[f"state{i}" if f"state{i}" in saved else name]
            largest, theirs = saved.get(f"absmax{i}"), saved.get(f"qmap{i}")
            if hasattr(moment, "codes"):  # torchao's
                moment, largest, theirs = moment.codes, moment.scale, moment.qmap
            if largest is None and self._is_in_8_bits(p):
                moment, largest = encoded_reference(moment, i == 1, self._floor)
            if largest is not None:
                if theirs is not None and not torch.allclose(theirs.to(p.device), map_, rtol=1e-6, atol=0):
                    raise ConfigError("The checkpoint's moments in 8 bits have a map that is not known here.")
                if largest.numel() != -(-p.numel() // BLOCK):
                    raise ConfigError("The checkpoint's moments in 8 bits are in blocks of another size than 256.")
                state[f"absmax{i}"] = largest.to(p.device, torch.float32, copy=True)
            dtype = torch.float32 if largest is None else torch.uint8
            state[f"state{i}"] = moment.to(p.device, dtype, copy=True).view(p.shape)
        return state


ROUNDING = "bf16_stochastic_round"


def chosen(trainer: TrainerHost, args: Any, model: Any) -> tuple[type, dict[str, Any]] | None:
    """Return our class and its options for an `optim` of ADAMW_8BIT; None where ranks share the weights out.

    Raises:
        ConfigError: FSDP2; `optim_args` that it does not know, or that have no effect.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2:
        raise ConfigError(
            f"optim: {name} needs all weights on each GPU, which FSDP2 shares out; expected DDP (accelerate_config: "
            "ddp) or one GPU. Under FSDP2 set optim: adamw_torch_fused, whose moments are shared out too."
        )
    if trainer.accelerator.distributed_type not in WHOLE or trainer.get_tp_size() > 1:
        return None
    rounds = {"": False, f"{ROUNDING}=false": False, f"{ROUNDING}=true": True}.get(
        (args.optim_args or "").replace(" ", "").lower()
    )
    if rounds is None:
        raise ConfigError(f"optim_args: expected {ROUNDING}=true or false for optim: {name}, got {args.optim_args!r}.")
    if rounds and not any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters()):
        raise ConfigError(f"optim_args: {ROUNDING} has no effect: no trained weight is in bf16. Set dtype: bfloat16.")
    # as Trainer asks bitsandbytes to
    wide = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return OneLaunchAdamW8bit, {**options, "in_32_bits": wide, ROUNDING: rounds, "seed": args.seed}
