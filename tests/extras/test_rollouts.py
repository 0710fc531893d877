"""Completions decoded step by step with kept keys: equal to `generate`'s, whoever leaves when; who is not served."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from recorders import RunsAgain, calls_of
from tiny import FAMILIES, VOCAB, completions, tiny_model, tiny_tokenizer
from trainings import distill, logged, trained
from transformers import GenerationConfig
from vision import vision_model

from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.extras import chat
from liger_trainer.extras.rollouts import decoding_layers as decoding_file
from liger_trainer.extras.rollouts import rollouts as rollouts_file
from liger_trainer.extras.rollouts.rollouts import NotServed, Rollouts
from liger_trainer.patching.graphs.recorder import CudaRecorder
from liger_trainer.run import samples
from liger_trainer.trainers import decoder as decoder_file
from liger_trainer.trainers.decoder import Decoder

REFUSED = {"mixtral": "experts", "gpt2": "something else for each implementation"}
SERVED = [family for family in FAMILIES if family not in REFUSED]
DEVICES = [("cpu", RunsAgain), pytest.param("cuda", CudaRecorder, marks=pytest.mark.gpu)]


def prompts_of(lengths=(1, 5, 17, 30, 2, 9, 9)):
    numbers = random.Random(0)
    return [[numbers.randrange(VOCAB - 5) for _ in range(length)] for length in lengths]


def settings(**options):
    defaults = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [5, 7], "pad_token_id": 0}
    return GenerationConfig(**{**defaults, **options})


def generated(model, prompts, how):
    """What `generate` writes, a prompt at a time, up to the end."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("family", SERVED)
def test_greedy_texts_are_those_of_generate(family, device, recorder):
    """Ends at different lengths, in one batch, with rows that wait, and again after the weights have changed."""
    model, prompts = tiny_model(family).to(device), prompts_of()
    endless = generated(model, prompts, settings(max_new_tokens=8, eos_token_id=None))
    how = settings(max_new_tokens=8, eos_token_id=[endless[2][4], endless[5][1]])
    want = generated(model, prompts, how)
    assert len(want[2]) <= 5 and len(want[5]) <= 2
    patch(model)
    rollouts = Rollouts(model, how, recorder)
    assert rollouts.complete(prompts, seed=0) == want
    assert rollouts.complete(prompts, seed=0, most_rows=3) == want
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert rollouts.complete(prompts[:2], seed=0) == generated(model, prompts[:2], how)
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.flip(1).contiguous()  # elsewhere
    assert rollouts.complete(prompts[:2], seed=0) == generated(model, prompts[:2], how)


def test_draws_follow_from_seed_and_prompt_and_from_nothing_else():
    model, prompts = tiny_model("qwen3"), prompts_of((4,) * 6)
    prompts = [prompts[0]] * 3 + prompts[3:]
    rollouts = Rollouts(model, settings(do_sample=True, eos_token_id=None), None)
    state = torch.random.get_rng_state()
    first = rollouts.complete(prompts, seed=3)
    assert rollouts.complete(prompts, seed=3) == first != rollouts.complete(prompts, seed=4)
    assert rollouts.complete(prompts, seed=3, most_rows=2) == first
    assert len(set(map(tuple, first[:3]))) == 3  # equal prompts draw differently
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("how", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 9, "top_p": 0.4}], ids=str)
def test_filters_keep_the_tokens_that_generate_keeps(how):
    model, prompt = tiny_model("qwen3"), prompts_of((6,))[0]
    options = {"do_sample": True, "temperature": 1.5, "eos_token_id": None, "max_new_tokens": 1, "top_k": 0, **how}
    drawn = Rollouts(model, settings(**options), None).complete([prompt] * 200, seed=0)
    scores = model(torch.tensor([prompt])).logits[:, -1].float() / 1.5
    for warp in model._get_logits_processor(settings(**options), 1, None, None, None):
        if "Temperature" not in type(warp).__name__:
            scores = warp(None, scores)
    kept = set(scores[0].isfinite().nonzero().flatten().tolist())
    assert {token for (token,) in drawn} == kept and 1 < len(kept) < VOCAB


def test_what_may_not_be_written_is_not():
    model, banned = tiny_model("qwen3"), list(range(10, VOCAB))
    how = settings(do_sample=True, suppress_tokens=banned, eos_token_id=None)
    drawn = Rollouts(model, how, None).complete(prompts_of(), seed=0)
    assert {token for text in drawn for token in text} <= set(range(10))


def test_one_token_one_prompt_none():
    model = tiny_model("llama")
    prompts = prompts_of((3, 1))
    assert Rollouts(model, settings(max_new_tokens=1), None).complete(prompts, 0) == generated(
        model, prompts, settings(max_new_tokens=1)
    )
    all_ends = Rollouts(model, settings(eos_token_id=list(range(VOCAB))), None)
    assert [len(text) for text in all_ends.complete(prompts, 0)] == [1, 1]
    assert all_ends.complete([], 0) == []


@pytest.mark.parametrize("recorder", [None, RunsAgain])
def test_adapters_write_as_they_do_next_to_the_weights(recorder):
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    patch(model)
    before, prompts = {n: p.clone() for n, p in model.named_parameters()}, prompts_of()
    want, rollouts = generated(model, prompts, settings()), Rollouts(model, settings(), recorder)
    assert rollouts.complete(prompts, 0) == rollouts.complete(prompts, 0) == want
    with model.disable_adapter():
        assert rollouts.complete(prompts, 0) == generated(model, prompts, settings()) != want
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_whole_module_that_is_switched_off_is_recorded_again(monkeypatch):
    """With `modules_to_save`, PEFT calls a trained copy or the original; a recording holds one of the two."""
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules=["v_proj"], modules_to_save=["q_proj"]))
    rollouts, recorded = Rollouts(model, settings(), RunsAgain), calls_of(monkeypatch, RunsAgain, "record")
    rollouts.complete(prompts_of(), 0)
    first = len(recorded)
    rollouts.complete(prompts_of(), 0)
    assert len(recorded) == first
    with model.disable_adapter():
        rollouts.complete(prompts_of(), 0)
    assert len(recorded) == 2 * first > 0


def test_merged_adapters_that_are_switched_off_do_not_write():
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    prompts, rollouts = prompts_of(), Rollouts(model, settings(), None)
    merged = rollouts.complete(prompts, 0)
    with model.disable_adapter():
        want = generated(model, prompts, settings())
    model.merge_adapter()
    assert rollouts.complete(prompts, 0) == merged
    with model.disable_adapter():
        assert rollouts.complete(prompts, 0) == want != merged


FAILURES = {  # of which method, and what comes of it
    "an error in between": (lambda rollouts, _: (rollouts, "_decode"), RuntimeError, "no more"),
    "no merge": (lambda _, model: (model.model.layers[1].mlp.up_proj, "merge"), NotServed, "cannot be merged .no more"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_adapters_weights_come_back_after_an_error(monkeypatch, case):
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    before, rollouts = {n: p.clone() for n, p in model.named_parameters()}, Rollouts(model, settings(), None)
    of, error, said = FAILURES[case]
    calls = []

    def fails(*_, **__):
        calls.append(1)
        raise RuntimeError("no more")

    monkeypatch.setattr(*of(rollouts, model.base_model.model), fails)
    with pytest.raises(error, match=said):
        rollouts.complete(prompts_of(), 0)
    assert calls and all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert model.config._attn_implementation == "sdpa"


def with_prompt_tuning():
    return get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def hooked():
    model = tiny_model()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


def odd_weights():
    model = tiny_model()
    model.model.norm.weight = type("Packed", (torch.nn.Parameter,), {})(model.model.norm.weight.data)
    return model


def with_other_layers():
    model = tiny_model("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention"]
    return model


def with_sinks():
    model = tiny_model()
    model.model.layers[0].self_attn.sinks = torch.zeros(4)
    return model


@pytest.mark.parametrize(
    "make, how, reason",
    [
        *((lambda family=family: tiny_model(family), {}, reason) for family, reason in REFUSED.items()),
        (tiny_model, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (tiny_model, {"num_beams": 2}, "num_beams"),
        (tiny_model, {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size of GenerationConfig"),
        (tiny_model, {"cache_implementation": "static"}, "cache_implementation of GenerationConfig"),
        (lambda: vision_model("qwen2_5_vl"), {}, "more than text"),
        (odd_weights, {}, "its weights are Packed"),
        (with_other_layers, {}, "layers of the kinds full_attention, linear_attention"),
        (with_sinks, {}, "its attention has sinks"),
        (lambda: tiny_model("qwen3", head_dim=264), {}, "wider than 256"),
        (with_prompt_tuning, {}, "prompts are learned"),
        (hooked, {}, "a LlamaMLP has hooks"),
        (lambda: tiny_model(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), {}, "rope depends"),
    ],
)
def test_who_is_not_served(make, how, reason):
    with pytest.raises(NotServed, match=reason):
        Rollouts(make(), settings(**how), None)


def test_a_model_that_computes_something_else_here_is_not_served(monkeypatch):
    """The first rollout compares a few steps with plain forward passes."""
    right = rollouts_file.decode_attention
    monkeypatch.setattr(rollouts_file, "decode_attention", lambda *args, **how: right(*args, **{**how, "window": 3}))
    with pytest.raises(NotServed, match="away from those of whole rows"):
        Rollouts(tiny_model(), settings(), None).complete(prompts_of(), 0)


def test_what_the_memory_does_not_hold_waits(monkeypatch):
    model, prompts, how = tiny_model("qwen3"), prompts_of(), settings()
    a_row = 2 * 2 * 2 * (30 + 12) * 8 * 4  # keys and values of layers, heads, tokens, width, bytes
    monkeypatch.setattr(rollouts_file, "free_memory", lambda _: int(5.5 * a_row / rollouts_file.MEMORY))
    rollouts = Rollouts(model, how, None)
    assert rollouts.complete(prompts, 0) == generated(model, prompts, how)
    assert max(rollouts._steps) == 4
    monkeypatch.setattr(rollouts_file, "free_memory", lambda _: 0)
    with pytest.raises(NotServed, match="lacks the memory"):
        Rollouts(model, how, None).complete(prompts, 0)


class CannotRecord(RunsAgain):
    def rehearsing(self):
        raise RuntimeError("it waits for the device")


def test_a_step_that_cannot_be_recorded_is_not_served():
    with pytest.raises(NotServed, match="cannot be recorded .it waits for the device"):
        Rollouts(tiny_model(), settings(), CannotRecord).complete(prompts_of(), 0)


def on_policy(**options):
    generation = {"do_sample": False}
    return distill(
        tiny_model("qwen3"), tiny_model("qwen3", seed=1), completions(8),
        **{"lmbda": 1.0, "max_completion_length": 6, "max_steps": 2, "generation_kwargs": generation, **options},
    )  # fmt: skip


def test_a_training_on_these_completions_is_the_one_on_those_of_generate():
    by_graphs, by_generate = (trained(on_policy(sampler=sampler)) for sampler in ("graphs", "generate"))
    assert logged(by_graphs) == pytest.approx(logged(by_generate), rel=1e-6)
    assert logged(by_graphs, "completion_length") == logged(by_generate, "completion_length")


def test_a_student_that_cannot_is_refused_or_sampled_by_generate(capsys):
    gpt2 = {"student": tiny_model("gpt2"), "teacher": tiny_model("gpt2", seed=1)}
    with pytest.raises(ConfigError, match="sampler: graphs does not go with this model: its attention computes"):
        trained(distill(**gpt2, data=completions(8), lmbda=1.0, sampler="graphs", max_completion_length=4))
    assert trained(on_policy()).state.global_step == 2  # auto, without a GPU
    assert "not in CUDA graphs" not in capsys.readouterr().out


@pytest.mark.parametrize("family, patched", [("qwen3", True), ("llama", True), ("qwen3", False)])
def test_a_layer_of_a_step_is_few_launches(family, patched, monkeypatch):
    """Products take activations and residuals along, and attention the rotation, also where adapters were."""
    model, calls = tiny_model(family), []
    if family == "llama":
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    if patched:
        patch(model)
    thin, attend = decoding_file.thin_linear, rollouts_file.decode_attention

    def counted(x, weights, biases=None, **how):
        calls.append(
            (len(weights), *sorted(name for name in ("norm", "activation", "residual") if how.get(name) is not None))
        )
        return thin(x, weights, biases, **how)

    def turning(*args, **how):
        calls.append(("attention", how["rotation"] is not None, how["rotation"] and how["rotation"].norm is not None))
        return attend(*args, **how)

    monkeypatch.setattr(decoding_file, "thin_linear", counted)
    monkeypatch.setattr(rollouts_file, "decode_attention", turning)
    rollouts = Rollouts(model, settings(max_new_tokens=2, eos_token_id=None), None)
    rollouts._proved = True
    rollouts.complete(prompts_of((3,)), 0)
    mlp = [(2, "activation")] if patched else [(2,)]
    attention = ("attention", patched, family == "qwen3") if patched else ("attention", False, None)
    layer = [(3,), attention, (1, "residual"), *mlp, (1, "residual")]
    step = [*layer, *layer, (1,)]  # the last is the head
    assert calls == [call for call in step if call[0] != "attention"] + step * rollouts_file.CHUNK  # prompts first


@pytest.mark.parametrize("family, kinds", [("llama", []), ("gemma3", ["sliding_attention", "full_attention"])])
def test_a_step_looks_cosines_up(family, kinds, monkeypatch):
    """They are computed for the prompts, and once for all steps; for longer rows once more."""
    model = tiny_model(family, **({"layer_types": kinds} if kinds else {}))
    computed = calls_of(monkeypatch, type(model.model.rotary_emb), "forward")
    rollouts = Rollouts(model, settings(), RunsAgain)
    rollouts._proved = True
    for prompts, tables in ((prompts_of(), 1), (prompts_of((3,)), 0), (prompts_of((90,)), 1)):
        want = generated(model, prompts, settings())
        computed.clear()
        assert rollouts.complete(prompts, 0) == want
        assert len(computed) == max(1, len(kinds)) * (1 + tables)


# Whoever asks for completions


@pytest.mark.parametrize("device, recorder", DEVICES)
def test_a_completion_may_be_shorter_this_time(device, recorder):
    """A schedule of lengths: the same graphs, no draw differs, and the end is where generate's would be."""
    model, prompts = tiny_model("qwen3").to(device), prompts_of((3, 9, 20))
    rollouts = Rollouts(model, settings(do_sample=True, eos_token_id=None), recorder)
    whole = rollouts.complete(prompts, 7)
    steps = dict(rollouts._steps)
    for most in (1, 5, 12):
        assert rollouts.complete(prompts, 7, most_tokens=most) == [text[:most] for text in whole]
    assert rollouts._steps == steps
    assert [len(text) for text in rollouts.complete(prompts, 7, most_tokens=99)] == [12] * 3


class Heard:
    """A streamer of transformers: what it was given."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sampler", ["graphs", "generate"])
def test_tokens_are_told_as_they_come(sampler, device):
    """The prompt, then each token, as `generate` does it; once to an end, once to the most tokens."""
    model, prompt = tiny_model("qwen3").to(device), prompts_of((4,))[0]
    plain = generated(model, [prompt], settings(max_new_tokens=40, eos_token_id=None))[0]
    for how, count in ((settings(max_new_tokens=40, eos_token_id=plain[20]), plain.index(plain[20]) + 1), (settings(
        max_new_tokens=40, eos_token_id=None), 40)):  # fmt: skip
        heard = Heard()
        (text,) = Decoder(sampler).complete(model, [prompt], how, seed=0, streamer=heard)
        assert text == plain[:count] and heard.ended
        assert heard.pieces == [prompt, *([token] for token in text)]


def test_a_decoder_keeps_what_it_has_recorded(monkeypatch):
    made = []
    noted = SimpleNamespace(Rollouts=lambda *given: made.append(given) or Rollouts(*given))
    monkeypatch.setattr(decoder_file, "load", lambda name: noted)
    model, prompts, decoder = tiny_model("qwen3"), prompts_of(), Decoder("graphs")
    for most in (8, 12, 3):
        how = settings(max_new_tokens=most)
        assert decoder.complete(model, prompts, how, seed=0) == generated(model, prompts, how)
    assert len(made) == 2  # for 8 tokens, and for 12
    assert decoder.complete(model, prompts, settings(top_k=1, do_sample=True), 0) == generated(
        model, prompts, settings()
    )
    assert len(made) == 3
    with pytest.raises(ConfigError, match="sampler: graphs does not go with this model: repetition_penalty"):
        decoder.complete(model, prompts, settings(repetition_penalty=2.0), 0)


def test_why_generate_samples_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(decoder_file, "GENERATE", "no sampler")  # so that a CPU's is one of graphs
    monkeypatch.setattr(decoder_file, "AUTO", "no sampler either")
    model, prompts, told = tiny_model("gpt2"), prompts_of((3, 9)), []
    for _ in range(2):
        decoder = Decoder("auto")
        for _ in range(2):
            told.append(decoder.complete(model, prompts, settings(), 0))
    assert told == [generated(model, prompts, settings())] * 4
    assert capsys.readouterr().out.count("completions of GPT2LMHeadModel are sampled by generate, not in CUDA") == 1


def test_the_completions_of_a_run_and_of_a_chat_are_decoded_here(monkeypatch):
    """Without a GPU only where it is asked for: then with the texts that generate writes."""
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    prompts = [samples.Prompt("", ids, None) for ids in prompts_of()]
    messages = [{"role": "user", "content": tokenizer.decode([9, 10])}]
    said, asked = {}, []
    monkeypatch.setattr(
        Rollouts, "complete", lambda self, *a, of=Rollouts.complete, **k: asked.append(1) or of(self, *a, **k)
    )
    for sampler in ("graphs", "generate"):
        asked.clear()
        monkeypatch.setattr(samples, "Decoder", partial(Decoder, sampler))
        texts = samples.complete(model, tokenizer, prompts, 6)
        speaker, pieces = chat.Speaker("student", model, tokenizer, decoder=Decoder(sampler)), []
        answer = speaker.answer(messages, chat.Manner(max_new_tokens=20, temperature=0), pieces.append)
        said[sampler] = texts, answer.text, answer.tokens
        assert "".join(pieces).strip() == answer.text
        assert len(asked) == (len(prompts) + 1 if sampler == "graphs" else 0)
    assert said["graphs"] == said["generate"]
    assert speaker.answer(messages, chat.Manner(20, 1.0, seed=3), pieces.append).text
