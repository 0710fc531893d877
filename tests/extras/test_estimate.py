"""The simulated step against real ones and against what is known of its parts; and the command around it."""

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
import transformers
import yaml
from commands import call, write_rows
from mtp_heads import ATTENTION
from mtp_heads import SIZES as HEAD_SIZES
from peft import LoraConfig, get_peft_model
from recorders import calls_of
from tiny import FAMILIES, SIZES, VOCAB, tiny_model, tiny_tokenizer

from liger_trainer.errors import ConfigError
from liger_trainer.extras.estimate import estimator as estimating
from liger_trainer.extras.estimate import simulate as memory_simulation
from liger_trainer.extras.estimate.estimator import GPUS, gpu_named
from liger_trainer.extras.estimate.memory_tracker import BLOCK, MemoryTracker
from liger_trainer.extras.estimate.simulate import ModelSpec, Rollout, StepSpec, simulate
from liger_trainer.extras.estimate.stand_ins import MomentsOptimizer
from liger_trainer.extras.estimate.step_spec import Sharding
from liger_trainer.extras.rollouts.rollouts import Rollouts
from liger_trainer.losses.spec import Distillation, LossOptions
from liger_trainer.patching.patcher import base_of, patch

ADAMW = functools.partial(torch.optim.AdamW, fused=True)
FOREACH = functools.partial(torch.optim.AdamW, foreach=True)

WIDE: Any = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "head_dim": 32,
}  # fmt: skip


def config_of(family: str = "llama", **overrides: Any) -> Any:
    name, options = FAMILIES[family]
    sizes: Any = {k: v for k, v in SIZES.items() if family != "gpt2" or k != "num_key_value_heads"}
    return getattr(transformers, name)(**{**sizes, **options, **overrides})


def step(**options: Any) -> StepSpec:
    defaults: Any = {
        "student": ModelSpec(config_of(**WIDE), torch.float32), "rows": 2, "length": 128,
        "optimizer": ADAMW,
    }  # fmt: skip
    return StepSpec(**{**defaults, **options})


LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0)


@functools.cache
def simulated(peft: bool = False, bits: int | None = None) -> Any:
    """What several tests read: a step on all weights, or on adapters, maybe over quantised weights."""
    student = ModelSpec(config_of(**WIDE), torch.float32, bits=bits)
    return simulate(step(student=student, peft=LORA if peft else None))


def parts(memory, phase: str):
    return memory.peaks[phase].parts


def built(spec: StepSpec) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(spec.student.config)


def weights(spec: StepSpec, part: Any = None) -> int:
    """The bytes of a model's weights, or of a part's, in whole blocks."""
    part = built(spec) if part is None else part
    return sum(-(-p.numel() * spec.student.dtype.itemsize // BLOCK) * BLOCK for p in part.parameters())


def test_the_tracker_counts_storages_once_until_they_are_freed():
    tracker = MemoryTracker()
    with tracker, tracker.during("work"):
        x = torch.empty(1000)  # 4,000 bytes take eight blocks
        y = x.view(10, 100)[2:]
        assert tracker.live["work"] == 8 * BLOCK
        del x
        assert tracker.live["work"] == 8 * BLOCK
        tracker.add([y], "kept")
        assert (tracker.live["work"], tracker.live["kept"]) == (0, 8 * BLOCK)
        del y
        assert tracker.bytes == 0
    assert tracker.peaks["work"].bytes == 8 * BLOCK


def test_parts_of_full_training_are_what_is_known_of_them():
    memory = simulated()
    size = weights(step())
    at_step = parts(memory, "optimizer")
    assert at_step["student weights"] == pytest.approx(size, rel=0.001)  # and the rotary frequencies
    assert at_step["gradients"] == size
    assert at_step["optimizer state"] == pytest.approx(2 * size, rel=0.01)  # and the step counts
    assert memory.trained_bytes == 4 * memory.parameters == 4 * memory.trainable
    assert parts(memory, "loss")["autocast copies"] == parts(memory, "loss")["gradients"] == 0
    assert parts(simulate(step(accumulation=4)), "loss")["gradients"] == size  # beside the activations


def test_a_trained_head_for_multi_token_prediction_is_counted():
    sizes = {**HEAD_SIZES, "layer_types": ATTENTION, "num_hidden_layers": len(ATTENTION)}
    config: Any = transformers.AutoConfig.for_model("qwen3_5_text", **sizes)
    spec = step(student=ModelSpec(config, torch.float32))
    plain, memory = simulate(spec), simulate(dataclasses.replace(spec, mtp_weight=0.1))
    lora = dataclasses.replace(spec, peft=LoraConfig(target_modules=["q_proj"]))
    of_adapters = simulate(lora).trainable, simulate(dataclasses.replace(lora, mtp_weight=0.1)).trainable
    width = config.hidden_size
    head = sum(p.numel() for p in built(spec).model.layers[0].parameters()) + 3 * width + 2 * width**2
    assert memory.parameters - plain.parameters == memory.trainable - plain.trainable == head
    assert of_adapters[1] - of_adapters[0] == head
    for part, bytes_each in {"student weights": 4, "gradients": 4, "optimizer state": 8}.items():
        more = parts(memory, "optimizer")[part] - parts(plain, "optimizer")[part]
        assert more == pytest.approx(bytes_each * head, rel=0.2), part  # in whole blocks, with step counts
    states = spec.rows * spec.length * width * 4
    backward = memory.peaks["backward"].bytes - plain.peaks["backward"].bytes
    assert backward >= 16 * head + 10 * states  # and what the head's layer keeps, and the gradient of its hidden states


def test_the_backward_of_a_delta_rule_has_the_states_and_the_tokens_of_all_chunks():
    heads, width, chunks = 16, 128, 32
    linear = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    sizes = {**HEAD_SIZES, **linear, "linear_key_head_dim": width, "linear_value_head_dim": width}
    config: Any = transformers.AutoConfig.for_model(
        "qwen3_5_text", **{**sizes, "layer_types": ["linear_attention"], "num_hidden_layers": 1}
    )
    spec = step(student=ModelSpec(config, torch.float32), rows=2, length=1024)
    plain, packed = (
        parts(simulate(dataclasses.replace(spec, by_lengths=by_lengths)), "backward")["in the backward"]
        for by_lengths in (False, True)
    )
    states, tokens = (chunks * heads * width * length * 4 for length in (width, 64))
    # states and their gradients; q, k, v, the output's gradient, dq and what is added to it
    of_chunks = 2 * states + 6 * tokens
    assert plain > of_chunks
    assert packed - plain == pytest.approx(of_chunks, rel=0.1)  # each of 32 documents may have a chunk more


@pytest.mark.parametrize(
    "family, adapted, remade",
    [
        ("qwen3", False, 0), ("qwen3", False, 1), ("llama_tied", True, 2),
        pytest.param("gpt2", False, 0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_the_forward_keeps_is_what_a_real_patched_model_saves(family, adapted, remade, monkeypatch, kernels):
    """In fp32 under the interpreter the real model takes the GPU's path, and autograd says what it saves."""
    model = tiny_model(family).train()
    config = model.config
    if adapted:
        model: Any = get_peft_model(model, LORA)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = -(-storage.nbytes() // BLOCK) * BLOCK
        return tensor

    ids = torch.randint(0, VOCAB, (2, 64))
    patch(base_of(model)).remake_mlps(remade)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    kept = []

    class Tracker(MemoryTracker):
        def enter(self, phase, part=None):
            if phase == "backward":
                kept.append(self.live["activations"] + self.live["loss"])
            super().enter(phase, part)

    monkeypatch.setattr(memory_simulation, "MemoryTracker", Tracker)
    peft = LORA if adapted else None
    simulate(step(student=ModelSpec(config, torch.float32), rows=2, length=64, peft=peft, remake_every=remade))
    del loss
    assert kept[0] == pytest.approx(sum(saved.values()), rel=0.02)  # the labels, the loss itself


def test_autocast_copies_each_weight_of_a_product_once_but_those_that_an_op_casts():
    spec = step(autocast=torch.bfloat16)
    layers = {name: m for name, m in built(spec).named_modules() if isinstance(m, torch.nn.Linear)}
    alone = ("o_proj", "lm_head")  # the others are computed by `linears` and `gated_linear`, which keep no cast weight
    linear = sum(m.weight.numel() for name, m in layers.items() if name.endswith(alone))
    assert parts(simulate(spec), "loss")["autocast copies"] == pytest.approx(2 * linear, rel=0.01)
    bf16 = step(autocast=torch.bfloat16, student=ModelSpec(spec.student.config, torch.bfloat16))
    assert parts(simulate(bf16), "loss")["autocast copies"] == 0


@pytest.mark.slow
def test_checkpointing_lora_and_quantised_weights_take_less():
    plain = simulate(step(rows=8))
    checkpointed = simulate(step(rows=8, checkpointing={"use_reentrant": False}))
    assert parts(checkpointed, "loss")["activations"] < parts(plain, "loss")["activations"] / 4
    lora = simulate(step(peft=LORA))
    assert lora.trainable < lora.parameters / 10
    adapters = parts(lora, "optimizer")["adapter weights"]
    assert adapters == parts(lora, "optimizer")["gradients"] == pytest.approx(4 * lora.trainable, rel=0.01)
    packed = simulate(step(peft=LORA, student=dataclasses.replace(step().student, bits=4)))
    assert packed.parameters == lora.parameters
    linear = parts(lora, "loss")["student weights"] - parts(packed, "loss")["student weights"]
    assert linear / (4 * lora.parameters) > 0.6  # all but the embeddings and the head


def test_weights_in_4_bits_are_unpacked_into_memory_of_the_largest(monkeypatch):
    monkeypatch.setattr("liger_trainer.extras.estimate.simulate._round_adapters", lambda model: None)  # alike in both
    packed = simulate(step(peft=LORA, student=dataclasses.replace(step().student, bits=4)))
    largest = 4 * WIDE["hidden_size"] * WIDE["intermediate_size"]
    for phase, peak in simulated(peft=True).peaks.items():
        assert parts(packed, phase)["activations"] - peak.parts["activations"] == largest, phase


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_4_bits_take_their_codes_and_one_layer_unpacked(family):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(
        family, **sizes, vocab_size=VOCAB, num_experts=8, num_local_experts=8, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    peft = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    how: Any = {"peft": peft, "rows": 1, "length": 8, "cuda_graphs": "never"}
    plain, packed = (
        simulate(step(student=ModelSpec(config, torch.bfloat16, experts=each), **how)) for each in (None, 0.5625)
    )
    numbers = 2 * 8 * 3 * 256 * 512
    assert packed.parameters == plain.parameters and packed.trainable == plain.trainable
    saved = parts(plain, "loss")["student weights"] - parts(packed, "loss")["student weights"]
    assert saved == pytest.approx((2 - 0.5625) * numbers, rel=0.01)
    unpacked = packed.peaks["forward"].bytes - (plain.peaks["forward"].bytes - saved)
    assert unpacked == pytest.approx(2 * 8 * 2 * 256 * 512, rel=0.1)  # gate and up, the larger projection


def test_adapters_over_a_quantised_base_are_bf16():
    """As TRL makes them, however many there are."""
    plain, packed = (parts(simulated(peft=True, bits=bits), "optimizer") for bits in (None, 4))
    assert packed["adapter weights"] * 2 == plain["adapter weights"]
    assert packed["optimizer state"] * 2 == pytest.approx(plain["optimizer state"], rel=0.05)  # blocks are rounded up


def with_sinks() -> Any:
    return transformers.AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=VOCAB, num_local_experts=2,
        num_experts_per_tok=1, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
def test_attention_with_sinks_stores_no_scores_where_it_is_ours(own):
    """transformers computes gpt-oss' attention eagerly, with a number for each pair of tokens."""
    spec = step(student=ModelSpec(with_sinks(), torch.bfloat16), rows=1, length=1024, own_attention=own)
    scores = 2 * 8 * 1024**2 * 2  # bytes, of both layers
    assert (parts(simulate(spec), "forward")["activations"] > scores) is not own


def test_quantised_weights_have_others_behind_them():
    plain, quantises = (memory.peaks["forward"] for memory in (simulated(), simulate(step(quantises=True))))
    behind = quantises.parts["weights behind the quantised"]
    assert quantises.bytes - plain.bytes == behind and 0 < behind < plain.parts["student weights"]


@pytest.mark.parametrize("itself", [False, True])
def test_a_teacher_takes_its_weights_and_its_last_hidden_states(itself):
    teacher: dict = {"peft": LORA, "teaches_itself": True}
    if not itself:
        teacher = {"teacher": ModelSpec(step().student.config, torch.bfloat16)}
    memory = simulate(step(loss=LossOptions(distillation=Distillation()), **teacher))
    expected = 0 if itself else weights(step()) / 2
    assert parts(memory, "loss")["teacher weights"] == pytest.approx(expected, rel=0.01)
    size = 4 if itself else 2
    assert parts(memory, "loss")["teacher activations"] == pytest.approx(2 * 128 * 256 * size, rel=0.1)


class _EveryMoment(memory_simulation._TrainerSteps):
    """Two whole steps of a Trainer, instead of the moments of them that can be the highest."""

    def run(self):
        for _ in range(2):
            for _ in range(min(self.spec.accumulation, 2)):
                self._micro_batch()
            with self.tracker.during("optimizer", "optimizer temporaries"):
                torch.nn.utils.clip_grad_norm_(self.trained, self.spec.max_grad_norm, foreach=True)
                self.optimizer.step()
                self.tracker.add(memory_simulation._states(self.optimizer), "optimizer state")
            self.student.zero_grad()


def _with_an_unused_weight(build, spec, by_lengths):
    model = build(spec, by_lengths)
    model.unused = torch.nn.Linear(100, 100, bias=False)
    return model


@pytest.mark.parametrize(
    "family, accumulation, options",
    [
        pytest.param("llama", 4, {"autocast": torch.bfloat16, "checkpointing": {}}, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, {"autocast": torch.bfloat16, "checkpointing": {}, "peft": LORA, "optimizer": FOREACH},
                     marks=pytest.mark.slow),
        ("gemma3", 4, {"loss": LossOptions(distillation=Distillation())}),  # with a teacher
    ],
)  # fmt: skip
def test_one_micro_batch_finds_the_peaks_of_two_whole_steps(family, options, accumulation, monkeypatch):
    model = ModelSpec(config_of(family), torch.float32)
    teacher = model if "loss" in options else None
    made = functools.partial(_with_an_unused_weight, memory_simulation._built)
    monkeypatch.setattr(memory_simulation, "_built", made)
    spec = step(student=model, teacher=teacher, accumulation=accumulation, **options)
    batches = calls_of(monkeypatch, memory_simulation._TrainerSteps, "_micro_batch")
    found = simulate(spec)
    assert len(batches) == 1
    monkeypatch.setattr(memory_simulation, "_TrainerSteps", _EveryMoment)
    every = simulate(spec)
    assert found.peaks.keys() == every.peaks.keys()
    for phase, peak in every.peaks.items():  # gradients that one operation makes may lie in one block
        assert found.peaks[phase].bytes == pytest.approx(peak.bytes, abs=2 * BLOCK)
        for part in peak.parts:
            assert found.peaks[phase].parts[part] == pytest.approx(peak.parts[part], abs=2 * BLOCK)


@pytest.mark.parametrize(
    "options", [{}, {"peft": LORA}, {"checkpointing": {"use_reentrant": False}}], ids=["full", "lora", "checkpointing"]
)
def test_graphs_have_the_memory_of_the_layers_apart(options, monkeypatch):
    """Their pool has what the layers allocate, gradients too; the rest of the step peaks beside it."""
    seen = []
    monkeypatch.setattr(memory_simulation, "MemoryTracker", lambda: seen.append(MemoryTracker()) or seen[-1])
    spec = step(**options)
    never, auto, always = (
        simulate(dataclasses.replace(spec, cuda_graphs=graphs)) for graphs in ("never", "auto", "always")
    )
    kept = Sharding().graphs_bytes(auto)
    assert Sharding().graphs_bytes(never) is None and auto.peaks == never.peaks == always.peaks
    assert kept == Sharding().graphs_bytes(always) and kept
    for phase, peak in Sharding().per_process(always).items():
        assert peak.bytes == never.peaks[phase].bytes + kept == sum(peak.parts.values())
    without, pooled, _ = seen
    assert without.pools.keys() == {None} and pooled.pools.keys() == {None, "student"}
    assert without.pools[None] > pooled.pools[None]
    if "peft" not in options:  # gradients of the layers' weights lie in the pool until the next step
        assert pooled.pools["student"] > weights(spec, built(spec).model.layers)
        state = auto.peaks["optimizer"].parts["optimizer state"]
        rest = auto.peaks["optimizer"].bytes - weights(spec, built(spec).model.layers)
        assert 0 <= rest - pooled.outside["optimizer"].bytes < 0.1 * state


@pytest.mark.parametrize(
    ("options", "has_gradients"),
    [({}, True), ({"accumulation": 2}, True), ({"accumulation": 2, "buckets": True}, False)],
    ids=["one micro-batch", "added up elsewhere", "in DDP's buckets"],
)  # fmt: skip
def test_graphs_of_recomputed_layers_keep_outputs_and_gradients_and_no_copies(options, has_gradients):
    """All are in their memory until the last is recorded; bf16 copies of weights are made in each layer's turn."""

    def of_layers(count: int) -> StepSpec:
        student = ModelSpec(config_of(**{**WIDE, "num_hidden_layers": count}), torch.float32)
        how = {"checkpointing": {"use_reentrant": False}, "autocast": torch.bfloat16, "cuda_graphs": "auto"}
        return step(student=student, **how, **options)

    few, many = (simulate(of_layers(count)).pools_bytes for count in (2, 6))
    spec = of_layers(4)
    layers = weights(spec, built(spec).model.layers) if has_gradients else 0
    assert many - few == layers + 4 * spec.rows * spec.length * WIDE["hidden_size"] * torch.float32.itemsize


def graphs_bytes(spec):
    return Sharding().graphs_bytes(simulate(spec))


def test_graphs_of_both_models_and_of_small_layers_alone(monkeypatch):
    model, loss = ModelSpec(config_of(**WIDE), torch.float32), LossOptions(distillation=Distillation({"forward_kl": 1}))
    taught = step(teacher=model, loss=loss, cuda_graphs="auto")
    trackers = []
    monkeypatch.setattr(memory_simulation, "MemoryTracker", lambda: trackers.append(MemoryTracker()) or trackers[-1])
    assert graphs_bytes(taught) and trackers[0].pools.keys() == {None, "student", "teacher"}
    monkeypatch.setattr(memory_simulation, "most_rows", lambda layers: 2 * 128 - 1)
    assert graphs_bytes(taught) is None
    assert graphs_bytes(dataclasses.replace(taught, cuda_graphs="always"))
    four_bit = dataclasses.replace(taught.student, bits=4)
    assert graphs_bytes(step(student=four_bit, peft=LORA, cuda_graphs="auto")) is None


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_a_rollout_takes_what_a_real_one_does(peft):
    """Keys and values of all rows, prompts in one flat row, and the weights under merged adapters."""
    rows, prompt, completion = 8, 96, 48
    spec = step(peft=peft, rollout=Rollout(rows, prompt, completion))
    memory = simulate(spec)
    plain = simulate(dataclasses.replace(spec, rollout=None))
    assert plain.sampling is None and plain.peaks == memory.peaks
    kept = 2 * 2 * (rows + 1) * SIZES["num_key_value_heads"] * (prompt + completion) * 32 * 4
    assert memory.sampling.parts["keys and values"] == pytest.approx(kept, abs=BLOCK)
    state = memory.peaks["optimizer"].parts["optimizer state"]
    assert memory.sampling.parts["optimizer state"] == state > 0
    model = transformers.AutoModelForCausalLM.from_config(config_of(**WIDE))  # a simulation has marked the other one
    model = model if peft is None else get_peft_model(model, peft)
    patch(base_of(model))
    how = transformers.GenerationConfig(max_new_tokens=completion, do_sample=False, eos_token_id=None)
    rollouts, prompts = Rollouts(model.eval(), how, None), [[*range(prompt)]] * rows
    rollouts.complete(prompts, 0, most_tokens=1)  # which proves it
    tracker = MemoryTracker()
    tracker.add([*model.parameters(), *model.buffers()], "student weights")
    with tracker, tracker.during("sampling"):
        rollouts.complete(prompts, 0)
    assert tracker.peaks["sampling"].bytes == pytest.approx(memory.sampling.bytes - state, rel=0.1)


def test_moments_of_8_bits_and_paged_ones():
    embeddings = weights(step(), built(step()).get_input_embeddings())  # whose moments have 32 bits, as in Trainer
    for options, wide, factor in (({"moments": 2, "bits": 8}, 2.0, 0.5), ({"moments": 1, "bits": 32}, 1.0, 1.0)):
        made = functools.partial(MomentsOptimizer, paged=False, **options)
        state = parts(simulate(step(optimizer=made)), "optimizer")["optimizer state"]
        assert state == pytest.approx(wide * embeddings + factor * (weights(step()) - embeddings), rel=0.03)
    paged = functools.partial(MomentsOptimizer, moments=2, bits=32, paged=True)
    assert parts(simulate(step(optimizer=paged)), "optimizer")["optimizer state"] == 0


@pytest.mark.parametrize(
    "family", ["gemma2", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite", "cohere"))]
)
def test_other_families_are_simulated(family):
    spec = step(student=ModelSpec(config_of(family), torch.float32), masked=True, autocast=torch.bfloat16, peft=None)
    assert simulate(spec).peaks["loss"].bytes > 0


def test_nothing_is_left_behind():
    """Neither stand-ins nor tensors without data, in caches say, so that real training goes on as before."""
    ids = torch.randint(0, VOCAB, (2, 16))
    losses = []
    for _ in range(2):
        model = tiny_model("qwen3")
        patch(model)
        losses.append(float(model(input_ids=ids, labels=ids).loss))
        simulate(step(student=ModelSpec(model.config, torch.float32), peft=LORA))
    assert losses[0] == losses[1]


def test_shares_of_several_processes():
    memory = simulated()
    alone, ddp = (sharding.per_process(memory) for sharding in (Sharding(), Sharding("DDP", 4, buckets=True)))
    plain = alone["optimizer"]  # in the loss there are no gradients yet, but their buckets
    assert ddp["optimizer"].bytes == pytest.approx(plain.bytes, abs=BLOCK * 100)
    assert ddp["loss"].bytes - alone["loss"].bytes == memory.trained_bytes
    zero = Sharding("ZeRO-1", 4, ("optimizer state",)).per_process(memory)["optimizer"]
    assert plain.bytes - zero.bytes == pytest.approx(0.75 * plain.parts["optimizer state"], abs=4)
    whole = Sharding("FSDP", 4, ("student weights",), gathers=True).per_process(memory)["forward"].parts
    assert whole["gathered layers"] == 2 * memory.layer_bytes
    mixed = simulate(step(autocast=torch.bfloat16))
    assert memory.layer_bytes == 2 * mixed.layer_bytes and memory.head_bytes == 2 * mixed.head_bytes > 0
    for tied in (False, True):
        peaks = Sharding("FSDP", 4, gathers=True).per_process(dataclasses.replace(mixed, tied=tied))
        assert {name for name, peak in peaks.items() if "gathered head" in peak.parts} == (
            {"forward", "loss", "backward"} if tied else {"loss"}
        )
    assert mixed.peaks["forward"].parts["autocast copies"] > 0
    for sharding, copies in ((Sharding("FSDP", 4, gathers=True), False), (Sharding("DDP", 4, buckets=True), True)):
        assert ("autocast copies" in sharding.per_process(mixed)["forward"].parts) == copies


@pytest.mark.slow
def test_packed_rows_read_by_lengths_take_what_unpacked_rows_take(project, capsys):
    """Where the model's own attention reads them, the mask grows with the square of the row."""
    packed = ("packing=true", "max_length=13", "per_device_train_batch_size=8", "bf16=false")
    by_lengths = _json(capsys, "--gpu", "H100 80GB", *packed)
    unpacked = _json(capsys, "--gpu", "H100 80GB", *packed[1:], "per_device_train_batch_size=8")
    own = _json(capsys, "--gpu", "H100 80GB", *packed, "attention=model")
    assert by_lengths["length"] == unpacked["length"] == 13 and own["length"] == 8 * 13
    assert by_lengths["peak_mib"] <= unpacked["peak_mib"] < own["peak_mib"]
    flash = _json(capsys, "--gpu", "H100 80GB", *packed, "attn_implementation=flash_attention_2")
    assert flash["peak_mib"] == pytest.approx(by_lengths["peak_mib"], rel=0.01)


def test_a_window_takes_no_mask_where_rows_are_read_by_lengths():
    spec = step(student=ModelSpec(config_of("gemma3"), torch.float32), autocast=torch.bfloat16, peft=None, length=64)
    masked, free = (parts(simulate(dataclasses.replace(spec, by_lengths=by)), "forward") for by in (False, True))
    assert free["activations"] < masked["activations"]


def test_gpus_by_name_and_by_size():
    for name, full in (("h100", "H100 80GB"), ("A100 40 GB", "A100 40GB"), ("4090", "RTX 4090 24GB")):
        assert gpu_named(name).name == full
    for name, full in (  # as nvidia-smi prints them, and as people write them
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24GB"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("Tesla T4", "T4 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("H100 PCIe", "H100 80GB"), ("rtx-4090", "RTX 4090 24GB"),
        ("rtx4090", "RTX 4090 24GB"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
    ):  # fmt: skip
        assert gpu_named(name).name == full
    for name in ("NVIDIA", "H100 NVL", "RTX 4090 Laptop GPU", "24"):  # none, or with other memory than its namesake
        with pytest.raises(ConfigError, match=r"no GPU is called .* Or give its memory: --gpu 24GB"):
            gpu_named(name)
    assert gpu_named("24GB").mib == 24 * 1024
    assert gpu_named("RTX 4060").name == "RTX 4060 8GB"  # and not the Ti, which has twice the memory
    assert gpu_named("4060 Ti 16GB").name == "RTX 4060 Ti 16GB"
    with pytest.raises(ConfigError, match="may be RTX 4060 Ti 16GB, RTX 4060 Ti 8GB: say which"):
        gpu_named("4060 ti")
    assert all(gpu.usable_mib < gpu.mib for gpu in GPUS)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(num_hidden_layers=2)
    config.save_pretrained("student")
    tiny_tokenizer().save_pretrained("student")
    rows = [{"prompt": "w1 w2", "completion": " ".join(["w3"] * (5 + i % 7))} for i in range(40)]
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = {
        "model_name_or_path": "student", "dataset_name": "rows.jsonl", "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "num_train_epochs": 1, "output_dir": "out", "max_length": 128,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def estimated(capsys, *arguments: str) -> tuple[int, str, str]:
    return call(capsys, "estimate", "run.yaml", *arguments)


def _json(capsys, *arguments: str) -> dict:
    code, out, _ = estimated(capsys, "--json", *arguments)
    return {**json.loads(out), "code": code}


def test_rows_with_sinks_are_our_kernel_s_in_16_bits_unless_attention_stays(project, capsys):
    with_sinks().save_pretrained("student")
    write_rows(project / "rows.jsonl", [{"text": " ".join(["w3"] * 600)}] * 40)
    rows = ("max_length=512", "gradient_checkpointing=false")
    ours = _json(capsys, *rows, "bf16=true")["peak_mib"]
    scores = 2 * 2 * 8 * 512**2 * 2 / 2**20  # of 2 rows, 2 layers and 8 heads, in bf16
    assert _json(capsys, *rows, "bf16=true", "attention=model")["peak_mib"] - ours > scores
    assert _json(capsys, *rows, "bf16=false")["peak_mib"] - ours > scores


def test_the_command(project, capsys):
    found = _json(capsys, "--gpu", "H100 80GB")
    assert (found["code"], found["fits"], found["recipe"]) == (0, True, "sft")
    assert sum(found["parts_mib"].values()) == pytest.approx(found["peak_mib"])
    assert found["length"] == 13  # the longest row: w1, w2w3, ten more words and the end
    assert found["steps"] == 10  # 38 rows of 40 are trained on, 4 a step
    assert found["tokens_per_step"] * found["steps"] == pytest.approx(found["total_tokens"], abs=found["steps"])
    # A step has no more tokens than there are: 38 rows fill one packed one of 2048 to less than a quarter.
    few = _json(capsys, "packing=true", "max_length=2048", "gradient_accumulation_steps=8")
    assert few["steps"] == 1 and few["tokens_per_step"] == few["total_tokens"] == found["total_tokens"] < 512
    assert "weights behind the quantised" in _json(capsys, "--gpu", "H100 80GB", "qat=int8")["parts_mib"]
    assert found["graphs_mib"] and _json(capsys, "cuda_graphs=never")["graphs_mib"] is None
    always = _json(capsys, "cuda_graphs=always")
    assert always["parts_mib"]["CUDA graphs"] == pytest.approx(found["graphs_mib"]) == always["graphs_mib"]
    for engine, records in (("fsdp2", True), ("zero3", False)):
        assert bool(_json(capsys, f"accelerate_config={engine}")["graphs_mib"]) is records
    auto = _json(capsys, "--gpu", "H100 80GB", "accelerate_config=auto", "num_processes=2")
    assert auto["sharding"]["name"] == "DDP"
    assert "auto is FSDP2" in estimated(capsys, "--gpu", "0.69GB", "accelerate_config=auto", "num_processes=2")[1]
    assert "CUDA graphs would take" in estimated(capsys, "--gpu", "H100 80GB")[1]


def test_what_does_not_fit_is_exit_code_3_with_what_takes_less(project, capsys, monkeypatch):
    """Half the rows twice as often keeps gradients beside the activations: more, where rows are short."""
    config_of(**WIDE).save_pretrained("student")
    monkeypatch.setattr(estimating, "CHANGES", estimating.CHANGES[:3])
    found = _json(capsys, "--gpu", "0.7GB", "gradient_accumulation_steps=1")
    assert found["code"] == 3 and found["fits"] is False
    keys = {setting.partition("=")[0] for change in found["changes"] for setting in change["settings"]}
    assert keys == {"optim", "use_peft", "lora_target_modules"}
    assert all(change["peak_mib"] < found["peak_mib"] for change in found["changes"])


DISTIL = ("recipe=distill", "teacher_model_name_or_path=student")


def test_a_teachers_weights_are_as_it_is_loaded(project, capsys):
    def teacher(*arguments: str) -> float:
        return _json(capsys, *DISTIL, *arguments)["parts_mib"]["teacher weights"]

    default = teacher()  # the run's dtype, under bf16
    assert default == pytest.approx(teacher("teacher_dtype=float32") / 2, rel=0.1)
    assert teacher("teacher_load_in_4bit=true") < teacher("teacher_load_in_8bit=true") < default


HIDDEN = ("recipe=distill", "teacher=cache", "teacher_cache_dir=c", "cache_kind=hidden")


def test_a_cache_of_hidden_states_takes_its_head_and_two_bytes_a_value(project, capsys):
    """The head lies beside the student; the rest of the teacher does not. Width from the teacher, or from the cache."""
    config_of(num_hidden_layers=3, hidden_size=128).save_pretrained("teacher")
    named = _json(capsys, *HIDDEN, "teacher_model_name_or_path=teacher", "beta=0.5", "bf16=true")
    head = VOCAB * 128 * 2
    assert named["parts_mib"]["teacher weights"] == pytest.approx(head / 2**20)
    tokens = named["total_tokens"]
    assert named["cache_mib"] == pytest.approx((tokens * 256 + head) / 2**20, rel=0.02)
    plain = _json(capsys, "recipe=distill", "teacher_model_name_or_path=teacher", "bf16=true")
    whole = plain["parts_mib"]["teacher weights"]
    assert whole + 64 < named["capture_mib"] < 1.5 * whole + 64  # what it holds while it reads, and cuBLAS's workspaces
    topk = ("cache_entries=8", "teacher_model_name_or_path=teacher", "bf16=true")
    logits = 8 * named["length"] * VOCAB * 4 / 2**20  # of a batch of 8 rows in fp32
    for draws, arrays in ((4, 5), (0, 4)):
        counted = _json(capsys, *HIDDEN[:3], *topk, f"cache_tail_draws={draws}")
        assert counted["capture_mib"] == pytest.approx(named["capture_mib"] + arrays * logits)
    wide = _json(capsys, *HIDDEN, "teacher_model_name_or_path=teacher", "bf16=false")
    assert wide["parts_mib"]["teacher weights"] == pytest.approx(2 * head / 2**20)
    missing = "teacher_model_name_or_path: missing, and no cache tells the width"
    assert missing in estimated(capsys, *HIDDEN)[2]


def test_fsdp2_keeps_shares_in_fp32_and_computes_in_bf16():
    """What lies in memory at the optimizer's step is fp32; the head's gradient and copies in the backward are bf16."""
    bf16 = ModelSpec(config_of(**WIDE), torch.bfloat16)
    spec = step(student=bf16, autocast=torch.bfloat16, shares=torch.float32)
    sharding = Sharding("FSDP", 2, ("student weights", "gradients", "optimizer state"), gathers=True)
    memory, whole = simulate(spec), simulate(step(autocast=torch.bfloat16))
    ours, theirs = (m.peaks["optimizer"].parts for m in (memory, whole))
    for part in ("student weights", "gradients", "optimizer state"):
        assert ours[part] == pytest.approx(theirs[part], rel=0.01)
    assert parts(memory, "loss")["loss"] < 0.8 * parts(whole, "loss")["loss"]
    assert memory.computed_bytes == memory.trained_bytes // 2
    peaks = sharding.per_process(memory)
    assert peaks["backward"].parts["gathered gradients"] == 2 * memory.layer_bytes
    kept = dataclasses.replace(sharding, accumulates=True).per_process(memory)["forward"].parts
    assert kept["gathered gradients"] == memory.computed_bytes
    layers = weights(spec, built(spec).model.layers)  # in bf16
    stays, graphed = dataclasses.replace(sharding, stays=True), simulate(dataclasses.replace(spec, cuda_graphs="auto"))
    assert sharding.outside_bytes(memory) + layers == stays.outside_bytes(
        dataclasses.replace(memory, whole_bytes=layers)
    )
    assert graphed.whole_bytes == layers < graphed.pools_bytes  # which have as many gradients
    shares = stays.share("backward", graphed.outside["backward"], graphed).parts["gradients"]
    assert shares == pytest.approx(memory.trained_bytes / 2, rel=0.2)
    lora = simulate(dataclasses.replace(spec, peft=LORA, shares=torch.bfloat16))
    assert parts(lora, "loss")["student weights"] == pytest.approx(weights(spec), rel=0.01)
