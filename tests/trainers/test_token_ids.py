"""Token ids that nobody knows: padded heads never write them, and rows that have them are found before training."""

import json
import os
import types

import numpy as np
import pytest
import requests
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset, Features, IterableDataset, List, Value
from peft import LoraConfig
from tiny import VOCAB, WORDS, completions, texts, tiny_model, tiny_tokenizer, train_args
from trainings import batches_of, distill, logged, sft
from trainings import trained as run
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl.generation import vllm_client, vllm_generation

from liger_trainer import LigerDistillConfig
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.trainers.capture import capture
from liger_trainer.trainers.decoder import ModelSampler
from liger_trainer.trainers.rows import AllowedIds, LargestIds

PADDED = 96


def hot(family: str = "llama", rows: int = PADDED, **options):
    """A model whose head has rows of padding, which are all likelier than any token."""
    model = tiny_model(family, vocab_size=rows, **options)
    with torch.no_grad():
        head = torch.nn.Linear(model.config.hidden_size, rows)
        head.weight.copy_(model.get_output_embeddings().weight)
        head.bias[:] = 0.0
        head.bias[VOCAB:] = 20.0
    model.lm_head = head
    return model


def with_tokens(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def make(student, teacher, data=None, **options):
    options = {"max_completion_length": 4, "max_steps": 1, "learning_rate": 0.0, **options}
    return distill(student, teacher, completions(16) if data is None else data, **options)


def assert_known_tokens(trainer) -> None:
    """Train, and look at all tokens that the losses are of."""
    seen = batches_of(trainer)
    losses = logged(run(trainer))
    assert losses and np.isfinite(losses).all()
    assert max(int(batch["input_ids"].max()) for batch in seen) < VOCAB


HEAD = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
PADDING = {  # rows of the student's and the teacher's head, or the student's base as teacher, and whose completions
    "the student's": (PADDED, VOCAB, {"lmbda": 1.0}),
    "the student's, by a teacher": (PADDED, VOCAB, {"seq_kd": True}),
    "the teacher's": (VOCAB, PADDED, {"seq_kd": True}),
    "both": (PADDED, PADDED, {"lmbda": 1.0, "gradient_accumulation_steps": 2}),
    "adapters on the head": (PADDED, PADDED, {"lmbda": 1.0, "peft_config": HEAD}),
    "the student without adapters": (
        PADDED, "self", {"beta": 1.0, "lmbda": 0.5, "seq_kd": True, "peft_config": LoraConfig(r=2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PADDING)
def test_rows_of_padding_are_not_sampled(case):
    """Else: an IndexError in the embedding of the one that has fewer rows, an index out of bounds in the loss."""
    student, teacher, options = PADDING[case]
    assert_known_tokens(make(hot(rows=student), teacher if teacher == "self" else hot(rows=teacher, seed=1), **options))


def test_nor_in_the_evaluation_of_prompts_alone():
    prompts = completions(4).remove_columns("completion")
    assert np.isfinite(make(hot(), hot(seed=3), eval_data=prompts).evaluate()["eval_loss"])


def test_tokens_of_one_tokenizer_alone_are_not_sampled(tmp_path):
    """The teacher's, which the student's tokenizer could not read, and the student's, which the teacher could not."""
    with_tokens("<tool>").save_pretrained(tmp_path)
    named = {"teacher_tokenizer_name_or_path": str(tmp_path)}
    assert_known_tokens(make(hot(rows=VOCAB + 3), hot(rows=VOCAB + 2, seed=3), lmbda=0.5, seq_kd=True, **named))
    tiny_model().save_pretrained(tmp_path / "short")
    tiny_tokenizer().save_pretrained(tmp_path / "short")
    mine = {"processing_class": with_tokens("<mine>"), "lmbda": 1.0}
    assert_known_tokens(make(hot(rows=VOCAB + 3), str(tmp_path / "short"), **mine))


def test_the_other_tokens_keep_their_shares():
    """Of a softmax over the tokens that there are; `suppress_tokens` of the user count too."""
    model, draws = hot(), 2500
    args = train_args(LigerDistillConfig, max_completion_length=1, generation_kwargs={"suppress_tokens": [7]})
    sampler = ModelSampler(args, tiny_tokenizer(), AllowedIds(VOCAB, frozenset({9, 200})))
    assert sampler.settings(model).suppress_tokens == [7, 9, *range(VOCAB, PADDED)]
    drawn = torch.tensor([row[0] for row in sampler.sample(model, [[3, 4, 5]] * draws, seed=1)])
    logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1, :VOCAB].double()
    logits[[7, 9]] = -torch.inf
    shares = torch.bincount(drawn, minlength=VOCAB) / draws
    assert (shares - logits.softmax(-1)).abs().sum() / 2 < 0.06
    args = train_args(LigerDistillConfig)
    assert ModelSampler(args, tiny_tokenizer(), AllowedIds(VOCAB)).settings(tiny_model()).suppress_tokens is None


# vLLM, as far as TRL's own code goes: there is no vLLM in these tests


@pytest.fixture
def without_vllm(monkeypatch):
    """TRL's client and generation, but for what sends weights to a GPU."""
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *args, **kwargs: True)
    for owner, name in (
        (vllm_client.VLLMClient, "init_communicator"), (vllm_client.VLLMClient, "close_communicator"),
        (vllm_generation.VLLMGeneration, "sync_weights"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda self, **kwargs: None)


@pytest.mark.parametrize("obeys", [True, False])
def test_a_vllm_server_is_told_through_trls_client(without_vllm, monkeypatch, obeys):
    model, asked = hot(), []

    @torch.no_grad()
    def post(session, url, **sent):
        """`/v1/completions` of vLLM's server: a bias of -100 to 100 is added to the logits."""
        request = json.loads(json.dumps(sent["json"]))
        asked.append(request)
        bias, choices = torch.zeros(PADDED), []
        for token, value in request["logit_bias"].items():
            bias[int(token)] = min(100.0, max(-100.0, value)) if obeys else 0.0
        for prompt in request["prompt"]:
            ids = torch.tensor([prompt])
            for _ in range(request["max_tokens"]):
                ids = torch.cat([ids, (model(ids).logits[:, -1] + bias).softmax(-1).multinomial(1)], 1)
            made = ids[0, len(prompt) :].tolist()
            choices.append({"prompt_token_ids": prompt, "token_ids": made, "logprobs": None})
        return types.SimpleNamespace(status_code=200, json=lambda: {"choices": choices})

    def get(*_, **__):
        return types.SimpleNamespace(status_code=200, headers={}, json=lambda: {"data": [{"id": "student"}]})

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(requests.Session, "get", get)
    monkeypatch.setattr(requests.Session, "post", post)
    trainer = make(
        hot(), hot(seed=3), lmbda=1.0, use_vllm=True, vllm_mode="server", vllm_server_base_url="http://vllm:8000",
        generation_kwargs={"logit_bias": {"5": 2.0}, "seed": 1},
    )  # fmt: skip
    if obeys:
        assert_known_tokens(trainer)
    else:
        with pytest.raises(ConfigError, match=r"vLLM sampled the token \d+, which student and"):
            trainer.train()
    wanted = {"5": 2.0, **{str(token): -100.0 for token in range(VOCAB, PADDED)}}
    assert asked and all(request["logit_bias"] == wanted and request["seed"] == 1 for request in asked)


@pytest.fixture
def one_of_a_group(monkeypatch):
    """TRL tells vLLM by the environment that this process is one of a group, and accelerate then makes one."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_vllm_in_this_process_is_told_in_its_sampling_parameters(without_vllm, one_of_a_group, monkeypatch):
    """By TRL's own code around LLM and SamplingParams, which are vLLM's."""
    made = []

    class Engine:
        def __init__(self, **kwargs):
            pass

        def generate(self, prompts, sampling_params, **kwargs):
            made.append(sampling_params)
            output = types.SimpleNamespace(token_ids=[3, 4], logprobs=None)
            return [types.SimpleNamespace(outputs=[output], prompt_token_ids=p["prompt_token_ids"]) for p in prompts]

    monkeypatch.setattr(vllm_generation, "LLM", Engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **kwargs: kwargs, raising=False)
    colocated = {"lmbda": 1.0, "use_vllm": True, "vllm_mode": "colocate"}
    assert_known_tokens(make(hot(), hot(seed=3), **colocated))
    assert made[0]["logit_bias"] == dict.fromkeys(range(VOCAB, PADDED), -100.0)
    made.clear()
    assert_known_tokens(make(tiny_model(), tiny_model(seed=3), **colocated))
    assert "logit_bias" not in made[0]


# Rows


def rows(*ids: list[int], labels: list[list[int]] | None = None) -> Dataset:
    return Dataset.from_dict({"input_ids": list(ids), "labels": labels or [[-100, *row[1:]] for row in ids]})


GOOD, BAD = [1, 2, 3, 4], [1, 2, VOCAB + 6, 4]
FOUND = rf"Row 2 of the (train|eval) dataset has token id {VOCAB + 6}, but the model has 64 tokens, ids 0 to 63; rows "
FOUND += "with such ids: 2"


def tune(data, eval_data=None, **options):
    return sft(None, data, eval_data, max_steps=1, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "max_length": 16},  # the row, not the packed sequence
        {"shuffle_dataset": True},  # as it was before
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
    ],
)
def test_a_row_with_an_id_that_the_model_does_not_have(options):
    nothing = [[-100] * 4, [-100, 2, 3, 4], [-100, 2, VOCAB + 6, 4], [-100, 2, VOCAB + 6, 4]]  # the first is left out
    data = rows(GOOD, GOOD, BAD, BAD, labels=nothing)
    with pytest.raises(DataError, match=FOUND):
        tune(data, **options)
    with pytest.raises(DataError, match=FOUND.replace("(train|eval)", "eval")):
        tune(rows(GOOD, GOOD), data, **options)
    with pytest.raises(DataError, match=FOUND.replace("(train|eval)", "seen")):
        tune(rows(GOOD, GOOD), {"seen": data}, **options)
    sft(wide(), data, max_steps=1, **options).train()


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_a_stream_with_an_id_that_the_model_does_not_have(column):
    """Known ones, as the first rows', train; each row is looked at when it is read, in training and evaluation."""
    good = {"input_ids": GOOD, "labels": [-100, *GOOD[1:]]}
    stream = IterableDataset.from_generator(lambda: iter([good] * 4 + [{**good, column: BAD}]))
    said = rf"Row 4 of the (train|eval) dataset has the id {VOCAB + 6} in '{column}', but there are 64 tokens, ids 0 to"
    for trainer in (tune(stream, num_train_epochs=1), make(tiny_model(), tiny_model(seed=1), stream)):
        trainer.args.max_steps = 3
        with pytest.raises(DataError, match=said):
            trainer.train()
        with pytest.raises(DataError, match=said):
            trainer.evaluate(stream)
    trainer = tune(stream.take(4))
    trainer.train()


def test_a_tokenizer_with_more_tokens_than_the_model():
    tokenizer = with_tokens("<more>")
    data = Dataset.from_list([*completions(3), {"prompt": "w1 <more>", "completion": " w2"}])
    with pytest.raises(DataError, match=f"Row 3 of the train dataset has token id {VOCAB}, but the model has 64 to"):
        tune(data, processing_class=tokenizer)
    trainer = tune(completions(3), processing_class=tokenizer)
    trainer.train()  # none of which uses it
    with pytest.raises(DataError, match=f"Row 3 of the eval dataset has the id {VOCAB} in 'input_ids'"):
        trainer.evaluate(data.to_iterable_dataset())
    packed = tune(data.to_iterable_dataset(), processing_class=tokenizer, packing=True, max_length=64)
    with pytest.raises(DataError, match="Row 0 of the packed train dataset has the id"):  # of all four in one
        packed.train()


@pytest.mark.parametrize("stream", [False, True])
def test_padding_of_tokenized_rows_is_taken_out_and_their_mask_is_learned(stream):
    """Rows padded beforehand, on either side, train as those without; a completion_mask says what is learned."""

    def logs(**of):
        data = Dataset.from_dict({name: [values] * 8 for name, values in of.items()})
        return logged(run(tune(data.to_iterable_dataset() if stream else data, logging_steps=1)), "grad_norm")

    for ids, mask in (([*GOOD, 0, 0], [1] * 4 + [0] * 2), ([0, 0, *GOOD], [0] * 2 + [1] * 4)):
        assert logs(input_ids=ids, attention_mask=mask) == logs(input_ids=GOOD)
        labels = [-100 if not kept or token == 2 else token for token, kept in zip(ids, mask, strict=True)]
        of_labels = logs(input_ids=GOOD, labels=[1, -100, 3, 4])
        assert logs(input_ids=ids, attention_mask=mask, labels=labels) == of_labels != logs(input_ids=GOOD)
    assert logs(input_ids=GOOD, completion_mask=[1, 0, 1, 1]) == of_labels


def test_ids_below_zero():
    for data, said in (
        (rows(GOOD, [1, -7, 3]), "Row 1 of the train dataset has token id -7"),
        (rows([1, 2, 3], labels=[[-100, -1, 3]]), "Row 0 of the train dataset has a supervised token of id -1, but"),
    ):
        with pytest.raises(DataError, match=said):
            tune(data)


MASKED = rows(GOOD, BAD, labels=[[-100, 2, 3, 4], [-100, 2, -100, 4]])
OF_TEACHER = f"Row 1 of the train dataset has token id {VOCAB + 6}, but the teacher has 64"


def wide(**options):
    return tiny_model(vocab_size=PADDED, **options)


def test_rows_of_a_distillation():
    """Tokens may be those of either's padding, as far as both have it; supervised ones are those of the vocabulary."""
    for teacher in (tiny_model(seed=1), {"a": wide(seed=1), "b": tiny_model(seed=2)}):
        with pytest.raises(DataError, match=OF_TEACHER):
            make(wide(), teacher, MASKED)
    make(wide(), wide(seed=1), MASKED).train()
    supervised = f"Row 2 of the train dataset has a supervised token of id {VOCAB + 6}, but the vocabulary that st"
    with pytest.raises(DataError, match=supervised):
        make(wide(), wide(seed=1), rows(GOOD, GOOD, BAD))


def test_rows_of_a_capture(tmp_path):
    args = train_args(LigerDistillConfig, teacher="cache", teacher_cache_dir=str(tmp_path / "cache"))
    supervised = "Row 1 of the train dataset has a supervised token of id 70, but the token"
    for teacher, said in ((tiny_model(), OF_TEACHER), (wide(), supervised)):
        with pytest.raises(DataError, match=said):
            capture(teacher, args, tiny_tokenizer(), rows(GOOD, BAD))


def test_a_teacher_of_another_tokenizer_reads_its_own_tokens(tmp_path):
    wide().save_pretrained(tmp_path)
    with_tokens(*(f"{word}x" for word in WORDS[:8])).save_pretrained(tmp_path)
    make(tiny_model(), str(tmp_path), texts(8), losses=[{"type": "uld"}]).train()


def test_rows_of_one_length_are_read(tmp_path):
    """As chunked beforehand: a column of lists that all have the same length has its own type."""
    column = List(Value("int64"), length=4)
    features = Features({"input_ids": column, "labels": column})
    data = Dataset.from_dict({"input_ids": [GOOD] * 4, "labels": [GOOD] * 4}, features=features)
    trainer = tune(data, dataset_kwargs={"skip_prepare_dataset": True}, save_strategy="steps", save_steps=1)
    assert trainer.train().training_loss > 0
    bad = Dataset.from_dict({"input_ids": [GOOD, BAD], "labels": [GOOD, BAD]}, features=features)
    with pytest.raises(DataError, match=f"Row 1 .* token id {VOCAB + 6}"):
        tune(bad, dataset_kwargs={"skip_prepare_dataset": True})


def test_the_largest_of_each_row():
    """Empty rows, rows over many chunks, a part of them, labels that are ignored; against Python."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 10**6, rng.integers(0, 5)).tolist() for _ in range(9000)]
    labels = [[-100 if token % 3 else token for token in row] for row in ids]
    whole = Dataset.from_dict({"input_ids": ids, "labels": labels})
    for data, part in ((whole, slice(None)), (whole.select(range(10, 20)), slice(10, 20))):
        found = LargestIds.of(data)
        assert found.tokens.tolist() == [max(row, default=0) for row in ids[part]]
        assert found.labels.tolist() == [max([0, *row]) for row in labels[part]]


class WithoutHead(LlamaForCausalLM):
    def get_output_embeddings(self):
        return None


@pytest.mark.filterwarnings("ignore::liger_trainer.MaterializedLogitsWarning")
def test_a_model_without_output_embeddings_trains():
    trainer = sft(WithoutHead(tiny_model().config), rows(GOOD, GOOD), max_steps=1)
    assert trainer.train().training_loss > 0
