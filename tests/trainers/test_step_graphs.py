"""Trainings in which the host does less: CUDA graphs on a GPU, and the walks over modules that are left out."""

import contextlib
import copy
import gc
import types

import pytest
import torch
import trainings
from caches import captured, trainer_of
from datasets import Dataset
from peft import LoraConfig
from tiny import WORDS, completions, texts, tiny_model, tiny_tokenizer, train_args
from torch import nn
from torch.nn.utils import prune
from trainings import logged, trained, weights_of
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerConfig, LigerTrainer
from liger_trainer.common.replacements import Replacements
from liger_trainer.compat.modules import without_walks
from liger_trainer.compat.sft_trainer import DataCollatorForLanguageModeling, with_lengths
from liger_trainer.errors import ConfigError
from liger_trainer.losses.spec import IGNORE_INDEX
from liger_trainer.trainers import step_graphs
from liger_trainer.trainers.step_graphs import FixedShapes, pad_to_few_shapes


def sft(model=None, rows=None, cls=LigerTrainer, **options):
    config = LigerConfig if cls is LigerTrainer else SFTConfig
    model = tiny_model("qwen3") if model is None else model
    return trainings.sft(model, rows or completions(), rows, cls=cls, config=config, **{"max_steps": 3, **options})


def test_without_a_gpu_auto_does_nothing_and_always_is_refused():
    assert trained(sft(cuda_graphs="auto")).graph_reports == {}
    trainer = sft(cuda_graphs="always")
    with pytest.raises(ConfigError, match="cuda_graphs: always does not go with this training: the device is cpu"):
        trainer.train()
    assert not {"train", "zero_grad"} & set(vars(trainer.model))


class SeesDDP(TrainerCallback):
    """Notes what accelerate would give DistributedDataParallel."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        handler = self.trainer.accelerator.ddp_handler
        self.seen = handler.gradient_as_bucket_view, handler.find_unused_parameters


class LearnsFromHiddenStates(LigerTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        read = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        return model(**read, output_hidden_states=True).hidden_states[-1].float().square().mean()


@pytest.mark.parametrize(
    "make, searches",
    {
        "every weight has a gradient": (lambda: sft(), False),
        "adapters": (lambda: sft(peft_config=LoraConfig(target_modules="all-linear")), False),
        "the user decides": (lambda: sft(ddp_find_unused_parameters=True), True),
        "experts": (lambda: sft(tiny_model("mixtral", output_router_logits=False)), True),
        "another loss": (lambda: sft(cls=LearnsFromHiddenStates), True),
        "a loss of the user": (
            lambda: sft(
                compute_loss_func=lambda outputs, labels, num_items_in_batch=None: (
                    outputs.logits.float().square().mean()
                )
            ),
            True,
        ),
        "layers left out at random": (lambda: sft(tiny_model("qwen3", layerdrop=0.1)), True),
        "hidden states alone": (lambda: distilled([{"type": "hidden_mse"}]), True),
        "hidden states and labels": (lambda: distilled([{"type": "hidden_mse"}, {"type": "ce"}]), False),
    }.values(),
)
def test_ddp_looks_for_weights_without_gradient_only_where_there_may_be_some(make, searches):
    trainer, sees = make(), SeesDDP()
    sees.trainer = trainer
    trainer.add_callback(sees)
    trainer.train()
    assert sees.seen == (True, searches)
    assert not trainer.accelerator.ddp_handler.gradient_as_bucket_view  # only for the training


def distilled(losses):
    return trainings.distill(
        tiny_model("qwen3"), tiny_model("qwen3", seed=1), completions(), losses=losses, max_steps=1
    )


def test_floating_point_operations_are_those_of_trl():
    ours, trl = (trained(sft(cls=cls)).state.total_flos for cls in (LigerTrainer, SFTTrainer))
    assert ours == trl > 0


class PutsToEval(TrainerCallback):
    """Puts a part of the model into eval mode between two steps."""

    def __init__(self):
        self.modes = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.model.layers[1].eval()

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.modes.append(all(module.training for module in model.modules()))

    on_step_end = on_substep_end


class SeesHeap(TrainerCallback):
    def __init__(self, fails=False):
        self.frozen, self.fails = [], fails

    def on_step_begin(self, args, state, control, **kwargs):
        self.frozen.append(gc.get_freeze_count())
        if self.fails and self.frozen[-1]:
            raise RuntimeError("for a test")


@pytest.fixture
def thawed():
    """Nothing is frozen: processes.py does that before the tests."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_there_after_the_first_steps_is_not_searched_for_garbage(fails, thawed):
    sees = SeesHeap(fails)
    trainer = sft(max_steps=6, callbacks=[sees])
    with pytest.raises(RuntimeError, match="for a test") if fails else contextlib.nullcontext():
        trainer.train()
    assert sees.frozen[:4] == [0] * 4 and sees.frozen[4] > 10_000 and gc.get_freeze_count() == 0


def test_a_heap_that_somebody_else_has_frozen_stays_so(thawed):
    gc.freeze()
    before = gc.get_freeze_count()
    sft(max_steps=6).train()
    assert gc.get_freeze_count() == pytest.approx(before, rel=0.1)  # what is frozen may still be freed


def test_every_step_trains_all_modules():
    watch = PutsToEval()
    trainer = sft(callbacks=[watch])
    trainer.train()
    assert watch.modes == [True] * 3
    assert "train" not in vars(trainer.model)


def test_a_copy_of_a_model_in_training_has_its_own_modes_and_gradients():
    model = tiny_model().train()
    for name, quick in without_walks(model).items():
        setattr(model, name, types.MethodType(quick, model))
    other = copy.deepcopy(model)
    for each in (model, other):
        each(input_ids=torch.arange(5)[None]).logits.sum().backward()
    other.model.eval()
    other.train().zero_grad()
    assert all(module.training for module in other.modules())
    assert all(p.grad is None for p in other.parameters()) and all(p.grad is not None for p in model.parameters())
    del model.model.norm._parameters["weight"]  # as when an adapter is deleted
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_a_callback_puts_in_get_a_mode_and_lose_their_gradients():
    model = tiny_model().train()
    for name, quick in without_walks(model).items():
        setattr(model, name, types.MethodType(quick, model))
    model.train().zero_grad()
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.3)  # under another name
    model.model.layers[1].mlp.down_proj = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 32)).eval()
    model.train()(input_ids=torch.arange(5)[None]).logits.sum().backward()
    assert all(module.training for module in model.modules()) and all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family, fixed_shapes", [("qwen3", True), ("mixtral", False)])
def test_padding_is_not_counted_by_an_auxiliary_loss(monkeypatch, family, fixed_shapes):
    graphed = types.SimpleNamespace(report="", undo=lambda: None)
    monkeypatch.setattr(step_graphs, "_graphed", lambda *_: {"student": graphed})
    trainer = sft(tiny_model(family), texts(20), packing=True, max_length=16)
    trainer.graph_reports = {}
    with step_graphs.reduce_host_work(trainer):
        assert isinstance(trainer.data_collator, FixedShapes) is fixed_shapes
    assert not isinstance(trainer.data_collator, FixedShapes)


@pytest.mark.parametrize("family, pads", [("qwen3", True), ("gpt2", False)])
def test_sampled_completions_get_few_lengths_where_positions_are_computed(family, pads):
    curves, lengths = [], []
    for few in (False, True):
        trainer = trainings.distill(
            tiny_model(family), tiny_model(family, seed=1), completions(), lmbda=1.0, max_completion_length=6,
            max_steps=3, generation_kwargs={"do_sample": False},
        )  # fmt: skip
        compute, seen, replacements = trainer.compute_loss, [], Replacements()
        trainer.compute_loss = lambda model, inputs, *args, compute=compute, seen=seen, **how: (
            seen.append(inputs["input_ids"].shape[1]) or compute(model, inputs, *args, **how)
        )
        if few:
            pad_to_few_shapes(trainer, replacements)
        curves.append(logged(trained(trainer)))
        lengths.append(seen)
        replacements.undo()
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert (lengths[1] == [-(-length // 8) * 8 for length in lengths[0]] != lengths[0]) is pads


class PadsOnTheLeft(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        batch = super().torch_call(examples)
        for name, filling in (("input_ids", 1), ("attention_mask", 0), ("labels", IGNORE_INDEX)):
            batch[name] = torch.nn.functional.pad(batch[name], (3, 0), value=filling)
        return batch


def test_padding_elsewhere_is_masked():
    losses = []
    for collator in (None, PadsOnTheLeft(pad_token_id=1)):
        torch.manual_seed(0)
        losses.append(logged(trained(sft(data_collator=collator, learning_rate=0.0))))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_batches_do_not_wait_for_the_device(pinned):
    args = train_args(LigerConfig)
    args.dataloader_pin_memory = pinned  # which a configuration without a GPU sets to False
    trainer = LigerTrainer(tiny_model(), args=args, train_dataset=completions(), processing_class=tiny_tokenizer())
    assert trainer.accelerator.non_blocking is pinned


def fixed(lengths, tokens=20, longest=10):
    """TRL's batch of documents of these lengths, and the one of a fixed shape."""
    rows = [{"input_ids": torch.randint(1, 50, (n,)).tolist()} for n in lengths]
    plain = with_lengths(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    return plain(rows), FixedShapes(plain, tokens, longest, pad_token_id=0)(rows)


@pytest.mark.parametrize("lengths, added", [((4, 6, 9), 1), ((9, 10), 1), ((5, 7, 8), 0)])
def test_packed_batches_are_filled_behind_their_documents(lengths, added):
    """The filling makes the last document longer, or, where that would be too long, is one of its own."""
    plain, batch = fixed(lengths)
    n = sum(lengths)
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert batch[name].dtype == plain[name].dtype and batch[name].shape == (1, 20)
        assert torch.equal(batch[name][:, :n], plain[name])
    assert (batch["labels"][:, n:] == IGNORE_INDEX).all()
    ends = batch["cu_seq_lens_q"]
    assert ends.dtype == torch.int32 and len(ends) == 17 and ends.diff().count_nonzero() == 3
    assert torch.equal(batch["seq_idx"][0], torch.repeat_interleave(torch.arange(16), ends.diff()))
    begins = batch["position_ids"][0] == 0
    assert torch.equal(begins.nonzero().flatten(), ends[:-1][ends.diff() > 0])
    assert batch["max_length_q"] == batch["max_length_k"] == 10 >= ends.diff().max()
    assert batch["padding_tokens"] == added


def test_up_to_128_documents_of_8192_tokens_make_one_shape():
    _, batch = fixed([80] * 100, tokens=8192, longest=2048)
    assert batch["padding_tokens"] == 192 and len(batch["cu_seq_lens_q"]) == 129


def test_batches_that_lack_much_or_have_more_stay_as_they_are():
    for lengths in ((4, 6), (9, 9, 9), (12, 7)):  # the last: a document that is longer than rows are
        plain, batch = fixed(lengths)
        assert batch.keys() == plain.keys() and torch.equal(batch["input_ids"], plain["input_ids"])
    rows = [{"input_ids": [1, 2, 3]}]
    taught = FixedShapes(lambda rows: {"input_ids": torch.ones(1, 19), "answers": torch.ones(1, 19, 4)}, 20, 10, 0)
    assert taught(rows)["answers"].shape == (1, 19, 4)


def batches_of(trainer):
    """Return the tokens' shape, loss and count of tokens so far, of each batch of an epoch."""
    trainer.model.train()
    seen = []
    for batch in trainer.get_train_dataloader():
        shape = tuple(batch["input_ids"].shape)
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        seen.append((shape, loss.item(), int(trainer._total_train_tokens)))
    return seen


@pytest.mark.parametrize("make", ["sft", "cache"])
@pytest.mark.parametrize("options", [{}, {"packing": True, "per_device_train_batch_size": 3}], ids=["padded", "packed"])
def test_few_shapes_change_no_loss(make, options, tmp_path):
    packs, data = "packing" in options, texts(120 if options else 24, seed=2)
    options = {"max_length": 128, "attention": "auto", **options}
    if make == "cache":
        args = captured(tmp_path / "cache", data, teacher=tiny_model(seed=1), **options)
        trainer = trainer_of(args, data)
    else:
        trainer = sft(tiny_model(), data, **options)
    want, replacements = batches_of(trainer), Replacements()
    trainer._total_train_tokens = 0
    pad_to_few_shapes(trainer, replacements)
    got = batches_of(trainer)
    replacements.undo()
    trainer._total_train_tokens = 0
    assert [shape for shape, *_ in batches_of(trainer)] == [shape for shape, *_ in want]
    assert [tokens for *_, tokens in got] == [tokens for *_, tokens in want]
    assert [loss for _, loss, _ in got] == pytest.approx([loss for _, loss, _ in want], rel=1e-5)
    before, after = ([length for (_, length), *_ in batches] for batches in (want, got))
    if packs:
        assert after.count(384) > len(after) / 2 and 384 not in before
    else:
        assert all(length % 8 == 0 for length in after) and any(length % 8 for length in before)


# on a GPU

LENGTH = 16


def fixed_rows(n=40):
    """Rows of one length, so that all batches have one shape."""
    ids = torch.randint(5, 59, (n, LENGTH), generator=torch.Generator().manual_seed(3)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


ON_GPU = {
    "per_device_train_batch_size": 2, "max_steps": 10, "learning_rate": 3e-3, "logging_steps": 1, "max_length": LENGTH,
    "dataset_kwargs": {"skip_prepare_dataset": True}, "use_cpu": False, "dataloader_pin_memory": True,
    "max_grad_norm": 1.0,
}  # fmt: skip
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
CASES = {
    "full": ({}, None),
    "accumulation": ({"gradient_accumulation_steps": 3}, None),
    "checkpointing": ({"gradient_checkpointing": True}, None),
    "bf16": ({"bf16": True}, None),
    "lora": ({}, LORA),
    "lora, bf16, checkpointing": ({"bf16": True, "gradient_checkpointing": True}, LORA),
    "evaluation in between": ({"eval_strategy": "steps", "eval_steps": 4}, None),
    "no set_to_none": ({"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}, None),
}


def losses_with(cuda_graphs, options, peft_config):
    trainer = trained(sft(
        tiny_model("qwen3", num_hidden_layers=3), fixed_rows(), peft_config=peft_config, cuda_graphs=cuda_graphs,
        **{**ON_GPU, **options},
    ))  # fmt: skip
    weights = {n: p.float() for n, p in weights_of(trainer).items() if trainer.model.get_parameter(n).requires_grad}
    return logged(trainer), logged(trainer, "grad_norm"), weights, trainer.graph_reports


@pytest.mark.gpu
@pytest.mark.parametrize("options, peft_config", CASES.values(), ids=CASES)
def test_a_training_in_graphs_is_the_one_without(options, peft_config):
    plain, graphed = (losses_with(mode, options, peft_config) for mode in ("never", "always"))
    assert plain[3] == {}
    assert graphed[3] == {"student": f"CUDA graphs: 3 layers of the student, hidden states of 2x{LENGTH}x32"}
    rtol = 2e-2 if options.get("bf16") else 1e-4
    assert graphed[0] == pytest.approx(plain[0], rel=rtol)
    assert graphed[1] == pytest.approx(plain[1], rel=10 * rtol)
    for name, weight in plain[2].items():
        assert (graphed[2][name] - weight).norm() <= 10 * rtol * weight.norm() + 1e-6, name


@pytest.mark.gpu
def test_distillation_in_graphs_is_the_one_without():
    curves = []
    for mode in ("never", "always"):
        trainer = trained(trainings.distill(
            tiny_model("qwen3", num_hidden_layers=3), tiny_model("qwen3", seed=1), fixed_rows(), **ON_GPU,
            cuda_graphs=mode, losses=[{"type": "forward_kl"}],
        ))  # fmt: skip
        curves.append(logged(trainer))
    assert set(trainer.graph_reports) == {"student", "teacher"}
    assert all("hidden states of 2x16x32" in report for report in trainer.graph_reports.values())
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_packed_rows_in_graphs_train_as_those_without(bf16):
    curves = {}
    for mode in ("never", "always" if bf16 else "auto"):
        torch.manual_seed(0)
        options = {**ON_GPU, "packing": True, "max_length": 64, "dataset_kwargs": None, "bf16": bf16}
        trainer = sft(tiny_model("qwen3", head_dim=16), texts(200), cuda_graphs=mode, **options)
        trainer.train()
        curves[mode] = [(log["loss"], log["num_tokens"]) for log in trainer.state.log_history if "loss" in log]
    report = trainer.graph_reports["student"]  # in fp32 attention is computed document by document
    assert ("hidden states of 1x128x32" in report) is bf16 is not ("synchronizing" in report)
    for plain, graphed in zip(*curves.values(), strict=True):
        assert graphed[0] == pytest.approx(plain[0], rel=2e-2 if bf16 else 1e-4)
        assert graphed[1] == plain[1]


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [False, True])
def test_a_loss_that_is_replayed_does_not_wait_for_the_device(monkeypatch, packing):
    options, rows = {**ON_GPU, "packing": packing, "bf16": True}, fixed_rows()
    if packing:  # as many documents in each row
        options |= {"max_length": 64, "dataset_kwargs": None}
        rows = Dataset.from_list([{"text": " ".join(WORDS[i % 30 : i % 30 + 5])} for i in range(400)])
    trainer = sft(tiny_model("qwen3", head_dim=16), rows, cuda_graphs="always", **options)
    compute, checked = trainer.compute_loss, []

    def compute_loss(*args, **how):
        replays = trainer.state.global_step > 5
        torch.cuda.set_sync_debug_mode("error" if replays else "default")
        try:
            return compute(*args, **how)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            checked.append(replays)

    monkeypatch.setattr(trainer, "compute_loss", compute_loss)
    trainer.train()
    assert checked.count(True) >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["attention", "adapters"])
def test_dropout_in_graphs_differs_from_step_to_step(where):
    model = tiny_model("llama", attention_dropout=0.5 if where == "attention" else 0.0)
    adapters = LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    options = {**ON_GPU, "learning_rate": 0.0, "peft_config": adapters if where == "adapters" else None}
    trainer = trained(sft(model, fixed_rows(2), cuda_graphs="always", **options))
    assert "2x16x32" in trainer.graph_reports["student"]
    replayed = logged(trainer)[3:]
    assert len(set(replayed)) == len(replayed)


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_said_and_runs_as_it_is():
    model = tiny_model("mixtral", output_router_logits=False)
    trainer = trained(sft(model, fixed_rows(), cuda_graphs="auto", **ON_GPU))
    assert trainer.graph_reports["student"].startswith("CUDA graphs: none for the student: ")
    assert trainer.state.global_step == 10


@pytest.mark.gpu
def test_rows_of_many_lengths_train_without_graphs_of_all():
    options = {"per_device_train_batch_size": 2, "max_steps": 20, "use_cpu": False, "dataloader_pin_memory": True}
    trainer = trained(sft(rows=texts(40), cuda_graphs="always", **options))
    assert trainer.state.global_step == 20
    assert trainer.graph_reports["student"].count("x32") <= 16
