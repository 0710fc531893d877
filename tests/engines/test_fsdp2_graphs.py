"""Layers of FSDP2 whose whole weights stay in place, and are replayed: two processes over gloo, against FSDP2 as it is.

Run as a script, it is one of two processes. Without a GPU what is recorded runs again (RunsAgain).
"""

import collections
import functools
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from engines.fsdp2_on_cpu import fsdp2
from peft import LoraConfig
from processes import finish, outcome_of
from recorders import RunsAgain
from tiny import tiny_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from trainings import distill, logged, sft, trained
from transformers import TrainerCallback

from liger_trainer import LigerConfig
from liger_trainer.patching.graphs.cuda_graphs import GraphedLayers, layers_of
from liger_trainer.patching.patcher import base_of
from liger_trainer.trainers import fsdp_memory, step_graphs

STEPS = 5
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
CASES = {
    "all weights": {},
    "freed after backward only": {"fsdp": {"reshard_after_forward": False}},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "accumulation, bf16": {"gradient_accumulation_steps": 2, "bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "checkpointing": CHECKPOINTING,
    "lora": LORA,
    "lora, bf16, checkpointing": {**LORA, **CHECKPOINTING, "bf16": True},
    "teacher": {"teacher": True},
    "sampled": {"teacher": True, "lmbda": 1.0, "max_completion_length": 6},
}
# what differs most; the others are slow
QUICK = ("accumulation, bf16", "evaluation", "lora, bf16, checkpointing", "teacher")


class Watch(TrainerCallback):
    """Notes where each layer's weights are in its forwards, and what is gathered in each step."""

    def __init__(self, gathered):
        self.gathered, self.steps, self.between = gathered, [], []
        self.places = collections.defaultdict(set)

    def watch(self, name, model):
        for index, layer in enumerate(layers_of(model)):
            layer.register_forward_pre_hook(functools.partial(self.note, (name, index)), with_kwargs=True)

    def note(self, key, layer, args, kwargs):
        if self.trainer.is_in_train and layer.training is (key[0] == "student") and len(self.steps) >= 2:
            self.places[key].add(tuple((id(p), p.data_ptr()) for p in layer.parameters()))

    def on_train_begin(self, args, state, control, **kwargs):
        for name, model in step_graphs._models(self.trainer).items():
            self.watch(name, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append(sum(self.gathered))
        self.gathered.clear()
        self.between.append(all(isinstance(p, DTensor) for p in model.parameters()))


def make(case, mode, **options):
    options = {**CASES[case], **options}
    options.pop("fsdp", None)
    common = {
        "max_steps": STEPS, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "cuda_graphs": mode,
        "logging_steps": 1, "max_length": 16, "dataset_kwargs": {"skip_prepare_dataset": True}, **options,
    }  # fmt: skip
    student = tiny_model("qwen3", num_hidden_layers=3)
    data = rows_of_one_length()
    if common.pop("teacher", False):
        return distill(student, tiny_model("qwen3", seed=1), data, data, **common)
    return sft(student, data, data, config=LigerConfig, **common)


def rows_of_one_length(n=24):
    """So that both ways have the same batches, of a shape that comes again."""
    ids = torch.randint(5, 59, (n, 16), generator=torch.Generator().manual_seed(3)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def run(case, mode, resume=None, free=1 << 40, **options):
    """Train; return what both ways have to have in common, and what they don't. free: bytes of memory, as is said."""
    gathered = []
    gather = _fsdp_param_group.foreach_all_gather
    RunsAgain.replays = 0
    with pytest.MonkeyPatch.context() as patch, fsdp2(**CASES[case].get("fsdp", {})):

        def counted(params, *rest):
            gathered.append(sum(param.sharded_param.numel() for param in params))
            return gather(params, *rest)

        patch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
        patch.setattr(step_graphs, "_why_no_graphs", lambda trainer: None)
        patch.setattr(fsdp_memory, "GraphedLayers", functools.partial(GraphedLayers, recorder=RunsAgain))
        patch.setattr(fsdp_memory, "free_memory", lambda device: free)
        patch.setattr(fsdp_memory, "memory_of_graphs", lambda device: 3 << 30)
        torch.manual_seed(0)
        trainer = make(case, mode, **options)
        watch = Watch(gathered)
        watch.trainer = trainer
        trainer.add_callback(watch)
        trained(trainer, resume)
        sizes = [sizes_of(layers_of(model)) for model in step_graphs._models(trainer).values()]
        trainer.evaluate()
        model = trainer.model
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.reshard()
        return {
            "loss": logged(trainer), "grad_norm": logged(trainer, "grad_norm"), "eval": logged(trainer, "eval_loss"),
            "weights": {name: p.full_tensor() for name, p in model.named_parameters()},
            "places": {key: len(seen) for key, seen in watch.places.items()},
            "gathered": watch.steps, "between": watch.between, "replays": RunsAgain.replays,
            "reports": trainer.graph_reports, "sizes": sizes,
            "left": [
                name for layer in layers_of(base_of(model)) for name in vars(layer)
                if name in ("forward", "set_reshard_after_forward")
            ],
        }  # fmt: skip


def sizes_of(layers):
    """Return how many weights layers have, and how many are trained."""
    parameters = [p for layer in layers for p in layer.parameters()]
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def main(path, *cases):
    results = {}
    for case in cases:
        if case == "too little memory":
            results[case] = {mode: run("all weights", mode, free=1000) for mode in ("auto", "always")}
        elif case == "resumed":
            results[case] = [
                run("lora", mode, save_strategy="steps", save_steps=3, output_dir=str(Path(path).parent / mode), **how)
                for mode, how in (
                    ("never", {}),
                    ("auto", {}),
                    ("auto", {"resume": Path(path).parent / "auto/checkpoint-3"}),
                )
            ]
        else:
            results |= {(case, mode): run(case, mode) for mode in ("never", "auto")}
    finish(results, path)


@functools.cache
def of_speed(quick):
    cases = [case for case in CASES if (case in QUICK) is quick]
    return outcome_of(
        2, "../engines/test_fsdp2_graphs.py", *cases, *(["too little memory", "resumed"] if quick else [])
    )


def both_ways(case):
    """The outcomes of a case, which is run with all that are as quick."""
    results = of_speed(case in QUICK)
    return results[case, "never"], results[case, "auto"]


PARAMETERS = [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", PARAMETERS)
def test_losses_and_weights_are_those_of_fsdp2_as_it_is(case):
    want, got = both_ways(case)
    for name in ("loss", "grad_norm", "eval"):
        assert got[name] == want[name], name
    for name, weight in want["weights"].items():
        assert torch.equal(got["weights"][name], weight), name


@pytest.mark.parametrize("case", PARAMETERS)
def test_each_weight_is_one_parameter_at_one_address(case):
    _, got = both_ways(case)
    assert set(got["places"].values()) == {1}
    assert got["replays"] > 0 and "FSDP2 kept" in got["reports"]["student"]
    assert all(got["between"]) and not got["left"]


@pytest.mark.parametrize(
    "case", [case for case in PARAMETERS if case.values[0] not in ("sampled", "freed after backward only")]
)
def test_a_step_gathers_trained_weights_once_and_frozen_ones_not_again(case):
    want, got = both_ways(case)
    (whole, trained), *teachers = got["sizes"]
    passes = 2 if "accumulation" in case else 1
    # FSDP2 gathers the student's for the forward and for the backward
    spared = passes * (2 * whole - trained) + sum(whole for whole, _ in teachers)
    assert want["gathered"][3] - got["gathered"][3] == spared > 0


def test_where_memory_lacks_fsdp2_goes_on_as_it_is():
    got, always = of_speed(True)["too little memory"].values()
    assert always["replays"] > 0  # `cuda_graphs: always` keeps them all the same
    assert "needs 3.0 GiB more, and one lacks 3.0 GiB of it" in got["reports"]["student"]
    assert got["replays"] == 0 and len(set(got["gathered"])) == 1 and not got["left"]


def test_a_checkpoint_of_shards_is_resumed():
    want, whole, resumed = of_speed(True)["resumed"]
    assert resumed["replays"] == 0 < whole["replays"]  # three steps are too few to record
    for got in (whole, resumed):
        assert got["loss"] == want["loss"]
        for name, weight in want["weights"].items():
            assert torch.equal(got["weights"][name], weight), name


if __name__ == "__main__":
    main(*sys.argv[1:])
