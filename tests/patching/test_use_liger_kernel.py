"""enable(): use_liger_kernel=True of Trainer and TRL's trainers, unmodified, served by our kernels."""

import random
import sys

import pytest
import torch
import transformers
import trl_runs
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, largest_vocabulary_tensor, tiny_model, tiny_tokenizer, train_args
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

import liger_trainer
from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.losses import deferred_logits
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.patching.patcher import patched_record
from liger_trainer.patching.use_liger_kernel import FusedLogProbs

pytestmark = [
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def served():
    before = transformers.trainer.apply_liger_kernel, Trainer.evaluation_loop
    liger_trainer.enable()
    yield
    liger_trainer.disable()
    assert (transformers.trainer.apply_liger_kernel, Trainer.evaluation_loop) == before


def rows(n=12, seed=0):
    """Rows of 7 to 9 tokens with labels on what follows the third."""
    rng = random.Random(seed)
    lengths = [rng.randint(7, 9) for _ in range(n)]
    ids = [[rng.randrange(VOCAB - 5) for _ in range(length)] for length in lengths]
    return Dataset.from_list([{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in ids])


collate = DataCollatorForSeq2Seq(tiny_tokenizer())


def make(model=None, arguments=None, **options):
    options = {"max_steps": 2, "use_liger_kernel": True, **options}
    return Trainer(
        tiny_model() if model is None else model, args=train_args(TrainingArguments, **options),
        train_dataset=rows(), eval_dataset=rows(6, seed=1), data_collator=collate, **(arguments or {}),
    )  # fmt: skip


def losses(trainer):
    return [log[name] for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log]


def assert_same_losses(got, want, rel=1e-5):
    assert len(losses(got)) == len(losses(want)) > 0
    assert losses(got) == pytest.approx(losses(want), rel=rel, abs=1e-7)


# transformers.Trainer


def loss_of_ones_own(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().square().mean() * labels.ne(-100).float().mean()


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
RUNS = {
    "evaluated": EVALUATED,
    "accumulated": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "parts chosen": {"liger_kernel_config": {"rms_norm": False, "cross_entropy": True}},
    "adapters": {"model": lambda: get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", r=4))},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.2, **EVALUATED},
    "a loss of one's own": {"arguments": {"compute_loss_func": loss_of_ones_own}, **EVALUATED},
}


@pytest.mark.parametrize("case", RUNS)
def test_a_stock_trainer_trains_the_patched_model_as_the_plain_one(case, capsys, monkeypatch):
    """And no logits of a batch exist, where nobody asks for them."""
    options, trainers = {"model": tiny_model, **RUNS[case]}, []
    make_model = options.pop("model")
    for flag in (False, True):
        torch.manual_seed(0)
        trainers.append(make(make_model(), **options, use_liger_kernel=flag))
        if case == "bf16":
            trainers[-1].evaluate()
        with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
            trainers[-1].train()
    if case in ("evaluated", "accumulated", "adapters"):
        assert 0 < seen.rows <= 8
    plain, trainer = trainers
    assert_same_losses(trainer, plain, rel=2e-2 if case == "bf16" else 1e-5)
    record = patched_record(trainer.model)
    assert patched_record(plain.model) is None
    assert capsys.readouterr().out.count(f"liger-trainer: {record.report}\n") == 1
    swapped, chosen = record.report.swapped, case == "parts chosen"
    assert "SwiGLU" in swapped and ("RMSNorm" in swapped, record.fused is not None) == (not chosen, not chosen)
    assert swapped["cross-entropy"] == chosen
    if case != "bf16":
        torch.testing.assert_close(
            list(trainer.model.parameters()), list(plain.model.parameters()), rtol=1e-4, atol=1e-5
        )


class Own(torch.nn.Module):
    """No model of transformers, but around one."""

    def __init__(self):
        super().__init__()
        self.model = tiny_model()

    def forward(self, **batch):
        return self.model(**batch)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (lambda: make(liger_kernel_config={"rms_norms": True}), "Unknown patch options: rms_norms. There are rope"),
        (lambda: make(liger_kernel_config={"cross_entropy": True, "fused_linear_cross_entropy": True}), "choose one"),
        (lambda: make(Own()), "needs a PreTrainedModel .* got Own"),
        # stored logits have no use under TRL's head
        (lambda: trl_runs.make("sft", use_liger_kernel=True, liger_kernel_config={"cross_entropy": True}),
         "cross_entropy=True has no effect here"),
    ],
)  # fmt: skip
def test_what_cannot_be_patched_is_an_error(trainer, message):
    with pytest.raises(ConfigError, match=message):
        trainer().train()


def test_a_model_made_anew_for_each_trial():
    made, trainers = [], []

    def model_init():
        made.append(tiny_model())
        return made[-1]

    for flag in (True, False):
        args = train_args(TrainingArguments, max_steps=2, use_liger_kernel=flag)
        trainers.append(Trainer(model_init=model_init, args=args, train_dataset=rows(), data_collator=collate))
        trainers[-1].train()
    assert_same_losses(*trainers)
    patched = [model for model in made if patched_record(model) is not None]
    assert len(made) == 4 and patched == [made[1]] and trainers[0].model is made[1]


@pytest.mark.parametrize(
    ("options", "same", "other"),
    [
        ({"rms_norm": False}, None, {"rms_norm": True}),
        ({"relu2": False}, {"relu_squared": False}, {"relu_squared": True}),  # Liger's name of ours
    ],
    ids=["ours", "Liger's name"],
)
def test_a_model_that_was_patched_before(options, same, other):
    model = tiny_model()
    record = patch(model, **options)
    make(model, **({"liger_kernel_config": same} if same else {})).train()
    assert patched_record(model) is record
    (name,) = options
    with pytest.raises(ConfigError, match=f"asks for {{'{name}': True}}, but this LlamaForCausalLM was patched with"):
        make(model, liger_kernel_config=other).train()


def test_a_patch_after_accelerate_has_wrapped_the_forward_keeps_its_autocast():
    trainer, seen = make(bf16=True, use_liger_kernel=False), []
    trainer.evaluate()
    trainer.model.lm_head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    patch(trainer.model)
    batch = collate(list(rows(2)))
    trainer.model(**batch)
    assert seen == [True]


# Evaluation


@pytest.fixture
def no_logits(monkeypatch):
    def compute(*_):
        raise AssertionError("logits were computed")

    monkeypatch.setattr(DeferredLogits, "compute", compute)
    monkeypatch.setattr(deferred_logits, "CHEAP", 0)


def test_a_loss_only_evaluation_computes_no_logits(no_logits):
    """By the flag, before a training too, and of a model that was patched before."""
    want = make(use_liger_kernel=False).evaluate()["eval_loss"]
    trainer, predicting, before = make(), make(prediction_loss_only=True), make(use_liger_kernel=False)
    patch(before.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    assert predicting.predict(rows(6, seed=1)).metrics["test_loss"] == pytest.approx(want, rel=1e-6)
    assert before.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    assert all(patched_record(t.model).fused is not None for t in (trainer, predicting))


@pytest.mark.parametrize(("flag", "bf16"), [(True, False), (False, True)])
def test_metrics_that_need_logits_get_them(flag, bf16):
    seen = {}

    def compute_metrics(prediction):
        seen[len(seen)] = torch.from_numpy(prediction.predictions)
        return {"mean": float(prediction.predictions.mean())}

    model = tiny_model()
    patch(model)
    options = {"arguments": {"compute_metrics": compute_metrics}, "bf16": bf16}
    metrics = make(model, use_liger_kernel=flag, **options).evaluate()
    plain = make(use_liger_kernel=False, **options).evaluate()
    assert seen[0].shape == seen[1].shape and seen[0].shape[-1] == VOCAB
    torch.testing.assert_close(seen[0], seen[1], rtol=0.1 if bf16 else 1e-5, atol=0.05 if bf16 else 1e-5)
    if bf16:  # computed under the autocast of their forward, though it is over
        assert all(torch.equal(logits.bfloat16().float(), logits) for logits in seen.values())
    assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"], rel=2e-2 if bf16 else 1e-6)


def test_skip_logits_gives_a_loss_and_computes_no_logits(no_logits):
    model, batch = tiny_model(), collate(list(rows(3)))
    patch(model)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            outputs = model(**batch, skip_logits=True)
            assert (outputs.logits is None and "logits" not in outputs) == torch.is_grad_enabled()
            torch.testing.assert_close(outputs.loss, model(**batch).loss)
    loss, *rest = model(**batch, skip_logits=True, return_dict=False)
    assert loss.dim() == 0 and not any(isinstance(x, (torch.Tensor, DeferredLogits)) for x in rest)

    with torch.no_grad():
        assert model(**batch, skip_logits=True).logits.shape[-1] == VOCAB  # not computed: nobody has read them
    # A loss computed outside needs them.
    batch.pop("labels")
    assert model(**batch, skip_logits=True).logits.shape[-1] == VOCAB


def test_data_parallel_is_refused(monkeypatch):
    from torch.nn.parallel import replicate

    model = tiny_model()
    patch(model)
    module = sys.modules["torch.nn.parallel.replicate"]  # as if there were two GPUs
    monkeypatch.setattr(module, "_get_device_index", lambda *_: 0)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, *_, **__: [tensors] * 2)
    with pytest.raises(ConfigError, match="does not run under nn.DataParallel.*torchrun"):
        replicate(model, [0, 1])


# Switching it on and off


def test_twice_is_once_and_off_without_on_is_harmless():
    ours = transformers.trainer.apply_liger_kernel
    loop = Trainer.evaluation_loop
    liger_trainer.enable()
    assert Trainer.evaluation_loop is loop and isinstance(trl_utils._ChunkedLogProbFunction, FusedLogProbs)
    for _ in range(2):
        liger_trainer.disable()
        assert transformers.trainer.apply_liger_kernel is not ours
        assert transformers.trainer.apply_liger_kernel is transformers.integrations.liger.apply_liger_kernel
        assert not hasattr(Trainer.evaluation_loop, "__wrapped__")
        assert not isinstance(trl_utils._ChunkedLogProbFunction, FusedLogProbs)


def test_switched_off_the_flag_means_liger_kernel_again():
    liger_trainer.disable()
    with pytest.raises(ImportError, match="liger-kernel >= 0.3.0 is not available"):
        make().train()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A package in the place of LinkedIn's, that takes note of what it is asked for."""
    package = tmp_path / "liger_kernel"
    (package / "transformers").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.8.5'\n")
    (package / "transformers" / "__init__.py").write_text(
        "asked = []\ndef _apply_liger_kernel_to_instance(model, **flags):\n    asked.append(flags)\n"
    )
    info = tmp_path / "liger_kernel-0.8.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_beside_liger_kernel_ours_is_the_one_and_says_so(stub, capsys):
    trainer = make()
    trainer.train()
    assert "liger_kernel" not in sys.modules
    out = capsys.readouterr().out
    assert f"{patched_record(trainer.model).report} The liger-kernel 0.8.5 that is installed is not used." in out


def test_switched_off_beside_liger_kernel_it_is_the_one(stub, monkeypatch):
    liger_trainer.disable()
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    trainer = make(liger_kernel_config={"rope": False})
    trainer.train()
    assert sys.modules["liger_kernel.transformers"].asked == [{"rope": False}]
    assert patched_record(trainer.model) is None


# TRL's trainers


def test_a_model_that_was_patched_before_trains_by_trl():
    """TRL's head comes above, and stays. Other models and trainers of TRL: test_trl_losses.py."""
    trainers = []
    for flag in (True, False):
        model = tiny_model()
        if flag:
            patch(model)
        trainers.append(trl_runs.make("sft", model, use_liger_kernel=flag))
        trainers[-1].train()
    assert_same_losses(*trainers, rel=1e-4)
    patched_record(trainers[0].model).undo()
    got, want = (t.evaluate()["eval_loss"] for t in trainers)
    assert got == pytest.approx(want, rel=1e-4)


def test_a_patch_of_a_model_with_trls_head_leaves_the_loss_to_it():
    model = tiny_model()
    add_fused_lm_head(model, temperature=0.7)
    head, batch = model.forward, collate(list(rows(3)))
    want = model(**batch, fused_lm_head=True).loss
    record = patch(model)
    assert "TRL" in record.report.left_alone["loss"] and record.fused is None
    assert model.forward.__func__ is head.__func__ and "RMSNorm" in record.report.swapped
    torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, want, rtol=1e-6, atol=0)
