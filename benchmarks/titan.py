"""torchtitan's parts in the order of its train step, as a trainer that `benchmarks.many_gpus` can watch.

Its Llama, activation checkpointing, compilation, FSDP2, loss, clipping, AdamW and garbage collection run as they are,
with its defaults. Weights, rows, rate and AdamW's numbers are those of the other trainers. Release 0.2.2, the newest
that runs on torch 2.11: 0.3.0 wants FSDP2's `DataParallelMeshDims`, and cannot checkpoint every second layer.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed
from torchtitan.models.llama3 import Transformer, llama3_args, parallelize_llama
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.tools.utils import GarbageCollection
from transformers import get_scheduler

from .trainer_cases import length_of
from .trainer_providers import Run


class TitanTrainer:
    """Trains the model of a `Run`. Attributes and callbacks are those of a Trainer that `Watch` uses."""

    is_fsdp_enabled = True

    def __init__(self, run: Run):
        self.run, self.config = run, _job_config(run)
        world = distributed.init_distributed(self.config.comm, base_folder=run.folder)
        self.dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=world)
        self.mesh = self.dims.get_mesh("batch")
        self.device = torch.device(run.device)
        self.args = SimpleNamespace(device=self.device, gradient_accumulation_steps=1)
        self.accelerator = SimpleNamespace(is_fsdp2=True)
        self.model = parallelize_llama(_model(run), self.dims, self.config)
        self.optimizers = build_optimizers([self.model], self.config.optimizer, self.dims)
        self.optimizer = self.optimizers.optimizers[0]
        warmup = run.options.get("warmup_steps", 0)
        self.scheduler = get_scheduler(run.options["lr_scheduler_type"], self.optimizer, num_warmup_steps=warmup)
        self.loss = build_cross_entropy_loss(self.config)
        self.garbage = GarbageCollection(gc_freq=self.config.training.gc_freq)
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def data_collator(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}

    def train(self) -> None:
        """Read the rows in the order in which accelerate deals them out: batch by batch, rank after rank."""
        data, rows, world = self.run.inputs["train_dataset"], self.run.case.rows, self.mesh.size()
        for step in range(self.run.options["max_steps"]):
            self.garbage.run(step + 1)
            first = (step * world + self.mesh.get_local_rank()) * rows
            self.optimizers.zero_grad()
            self.training_step(self.data_collator([data[i] for i in range(first, first + rows)]))
            self._get_grad_norm()
            self.optimizers.step()
            self.scheduler.step()
            for callback in self.callbacks:
                callback.on_step_end()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of this rank's tokens. The last token of a row has none after it to predict."""
        ids = batch["input_ids"]
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
        tokens = distributed.dist_sum((labels != IGNORE_INDEX).sum().to(self.device), self.mesh)
        loss = self.loss(self.model(ids.to(self.device)), labels.to(self.device)) / tokens
        loss.backward()
        return loss.detach() * self.mesh.size()

    def _get_grad_norm(self) -> torch.Tensor:
        parameters = list(self.model.parameters())
        return distributed.clip_grad_norm_(parameters, self.config.training.max_norm, foreach=True)


def _job_config(run: Run) -> JobConfig:
    config, case = JobConfig(), run.case
    config.job.dump_folder = run.folder
    config.training.seq_len, config.training.local_batch_size = length_of(case, run.tiny), case.rows
    if run.tiny:
        config.training.mixed_precision_param = "float32"
    checkpoints = config.activation_checkpoint
    checkpoints.mode = "none" if not case.checkpointing else "selective" if case.selective else "full"
    checkpoints.selective_ac_option = "2"  # every second layer
    config.compile.enable = run.provider.compiles
    adamw = config.optimizer  # its defaults are of pre-training; these are transformers'
    adamw.lr, adamw.beta2, adamw.weight_decay = run.options["learning_rate"], 0.999, 0.0
    return config


def _model(run: Run) -> Any:
    """Return its Llama with the weights that the other trainers have, in fp32, without Llama-3.1's stretched RoPE."""
    theirs = run.random()
    sizes = theirs.config
    args = replace(
        llama3_args["8B"], dim=sizes.hidden_size, n_layers=sizes.num_hidden_layers, n_heads=sizes.num_attention_heads,
        n_kv_heads=sizes.num_key_value_heads, vocab_size=sizes.vocab_size, norm_eps=sizes.rms_norm_eps,
        rope_theta=sizes.rope_parameters["rope_theta"], rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=length_of(run.case, run.tiny), multiple_of=sizes.intermediate_size,
        ffn_dim_multiplier=0.01,  # so small that the width of MLPs is rounded up to the first multiple
    )  # fmt: skip
    with torch.device(run.device):
        model = Transformer(args)
    weights = Llama3StateDictAdapter(args, None).from_hf(theirs.state_dict())
    model.load_state_dict(weights)
    return model
