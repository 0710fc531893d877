"""`generate`: rows are what the teacher samples and the filters keep, however often it is killed; a run reads them."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
from commands import end_of, write_rows
from served import served
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_trainer
from liger_trainer.errors import ConfigError, CorruptError, DataError
from liger_trainer.extras.generate import run as generation
from liger_trainer.extras.generate.options import GenerateOptions, read_options
from liger_trainer.extras.generate.sieve import NearDuplicates, Sample, Sieve, grams_of, repetition
from liger_trainer.extras.generate.teachers import ServedTeacher

SMALL = {"max_new_tokens": 24, "max_prompt_tokens": 24, "batch_size": 4, "near_duplicates": 1.0, "max_repetition": 1.0}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("teacher")
    tiny_model(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path) -> str:
    rng = random.Random(os.urandom(4))
    path = tmp_path / "prompts.jsonl"
    texts = [" ".join([word, *rng.choices(WORDS, k=rng.randint(0, 8))]) for word in rng.sample(WORDS, 10)]
    write_rows(path, [{"prompt": text} for text in texts])
    return str(path)


def read(path: Path | str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rows_in(folder: Path) -> list[dict]:
    return read(folder / "train.jsonl")


def made(teacher: str, folder: Path, **options):
    return generation.generate(teacher, folder, GenerateOptions(**{**SMALL, **options}))


def test_greedy_completions_are_those_of_the_model(teacher, prompts, tmp_path):
    """Of each prompt alone, without padding; a batch has prompts of several lengths."""
    options = {"prompts": prompts, "temperature": 0, "keep_unfinished": True}
    generated = made(teacher, tmp_path / "out", **options)
    model, tokenizer = tiny_model(seed=3), tiny_tokenizer()
    want = {}
    for row in read(prompts):
        messages = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        alone = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        out = model.generate(**alone, max_new_tokens=24, do_sample=False)[0, len(ids) :]
        want[messages[0]["content"]] = tokenizer.decode(out, skip_special_tokens=True).strip()
    got = {row["prompt"][0]["content"]: row["completion"][0]["content"] for row in rows_in(tmp_path / "out")}
    assert got.items() <= want.items() and generated.rows == len(got)
    texts = {prompt for prompt, text in want.items() if text}
    assert got.keys() == texts and generated.dropped.get("empty", 0) == len(want) - len(texts)
    assert len(texts) > 3


def test_drawn_prompts_follow_the_models_probabilities(teacher, tmp_path):
    """The first word of a prompt is drawn as the model predicts after `<user>`."""
    made(teacher, tmp_path / "out", num_rows=270, batch_size=256, keep_unfinished=True, max_new_tokens=2)
    assert len(rows_in(tmp_path / "out")) == 270
    firsts = Counter()
    for sample in read(tmp_path / "out/samples/part-000000.jsonl"):
        firsts[sample["prompt"][0]["content"].split()[0] if sample["prompt"] else ""] += 1
    tokenizer = tiny_tokenizer()
    with torch.no_grad():
        p = tiny_model(seed=3)(torch.tensor([tokenizer("<user>")["input_ids"]])).logits[0, -1].softmax(-1)
    likeliest = int(p[: len(WORDS)].argmax())
    n, expected = sum(firsts.values()), float(p[likeliest])
    assert abs(firsts[WORDS[likeliest]] / n - expected) < 5 * (expected * (1 - expected) / n) ** 0.5 + 0.02
    for row in rows_in(tmp_path / "out"):
        assert not {"<user>", "<assistant>", "<eos>"} & {*row["prompt"][0]["content"].split()}


def test_the_seed_decides_the_rows(teacher, prompts, tmp_path):
    def texts(name, **options):
        made(teacher, tmp_path / name, prompts=prompts, keep_unfinished=True, **options)
        return (tmp_path / name / "train.jsonl").read_bytes()

    assert texts("a") == texts("b") != texts("c", seed=7)
    assert texts("greedy", temperature=0) == texts("k", top_k=1) == texts("p", top_p=1e-6)
    texts("d", completions_per_prompt=2)
    assert max(Counter(row["prompt"][0]["content"] for row in rows_in(tmp_path / "d")).values()) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from liger_trainer.extras.generate import run
from liger_trainer.extras.generate.options import GenerateOptions
calls, number = 0, int(sys.argv[4])
def mortal(function):
    def call(*args):
        global calls
        calls += 1
        if calls == number: os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args)
        calls += 1
        if calls == number: os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call
from liger_trainer.extras.generate import store
store.PARTS_OF_A_SHARD = 2
for moment in range(number, 60, 11):
    child = os.fork()
    if child == 0:
        number = moment
        os.fsync, os.replace = mortal(os.fsync), mortal(os.replace)
        run.generate(sys.argv[1], Path(sys.argv[2]), GenerateOptions(**eval(sys.argv[3])))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("killed" if os.WIFSIGNALED(status) else "done", flush=True)
run.generate(sys.argv[1], Path(sys.argv[2]), GenerateOptions(**eval(sys.argv[3])))
"""


@pytest.mark.slow
def test_killed_runs_end_with_the_same_files(teacher, prompts, tmp_path):
    options = {**SMALL, "prompts": prompts, "completions_per_prompt": 3, "keep_unfinished": True}
    generation.generate(teacher, tmp_path / "whole", GenerateOptions(**options))
    words = [sys.executable, "-c", KILLED, teacher, str(tmp_path / "killed"), repr(options), "1"]
    out = subprocess.run(words, capture_output=True, text=True, check=True)
    assert out.stdout.count("killed") >= 3
    for name in ("train.jsonl", "README.md"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "killed/samples").glob("*.tmp"))


def test_ctrl_c_keeps_the_batches_before(teacher, prompts, tmp_path, monkeypatch, capsys):
    words = [f"{k}={v}" for k, v in {**SMALL, "prompts": prompts, "keep_unfinished": True}.items()]
    ask, asked = generation.LocalTeacher.ask, []

    def interrupted(self, ids, *rest):
        asked.append(ids)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return ask(self, ids, *rest)

    monkeypatch.setattr(generation.LocalTeacher, "ask", interrupted)
    assert end_of("generate", teacher, str(tmp_path / "out"), *words) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert end_of("generate", teacher, str(tmp_path / "out"), *words) == 0
    assert len(asked) == 4  # three batches of ten prompts, the third one twice
    before = (tmp_path / "out/train.jsonl").read_bytes()
    assert end_of("generate", teacher, str(tmp_path / "out"), *words) == 0
    assert len(asked) == 4 and (tmp_path / "out/train.jsonl").read_bytes() == before
    assert end_of("generate", teacher, str(tmp_path / "out"), *words, "seed=1") == 2
    assert "seed was 42 and is 1" in capsys.readouterr().err


def test_a_run_reads_the_rows(teacher, prompts, tmp_path, capsys):
    folder, counts = tmp_path / "out", []
    options = GenerateOptions(**SMALL, prompts=prompts, keep_unfinished=True)
    generated = liger_trainer.generate_dataset(teacher, str(folder), options, lambda *rows: counts.append(rows))
    assert counts[-1] == (generated.rows, None) and len(counts) == 4  # nothing stored, then three batches
    (tmp_path / "my.yaml").write_text(f"model_name_or_path: {teacher}\ndataset_name: {folder}\nuse_cpu: true\n")
    assert end_of("preview", str(tmp_path / "my.yaml"), "--rows", "1") == 0
    assert "<assistant>" in capsys.readouterr().out
    import datasets

    assert datasets.load_dataset(str(folder), split="train").num_rows == len(rows_in(folder))
    card = (folder / "README.md").read_text()
    assert str(tmp_path) not in card and "seed" in card and "prompts.jsonl" in card


def test_damage_and_strangers_are_noticed(teacher, prompts, tmp_path):
    options = {"prompts": prompts, "keep_unfinished": True}
    made(teacher, tmp_path / "out", **options)
    part = tmp_path / "out/samples/part-000001.jsonl"
    part.write_bytes(part.read_bytes().replace(b"w", b"v", 1))
    (tmp_path / "out/train.jsonl").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("x")
    for folder, changes, error, message in (
        ("out", {}, CorruptError, r"part-000001\.jsonl is not what was written"),
        ("other", {}, ConfigError, r"other files \(mine\.txt\)"),
        ("none", {"min_completion_words": 99}, DataError, "none is left"),
        ("none", {"prompts": "missing.txt"}, ConfigError, "^prompts: no such file or directory: missing.txt$"),
        ("long", {"max_new_tokens": 120}, ConfigError, "reads at most 128"),
    ):
        with pytest.raises(error, match=message):
            made(teacher, tmp_path / folder, **{**options, **changes})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["temprature=1"], "temprature: unknown option of generate. Did you mean temperature?"),
        (["num_rows=2.5", "top_p=2"], "num_rows: expected an integer or null, got 2.5"),
        (["held_out_ngram=5"], "held_out_ngram: has no effect without `held_out`."),
        (["prompt_column=x"], "prompt_column: has no effect without `prompts`."),
        (["teacher_server_base_url=http://x/v1", "dtype=float32"], "dtype: has no effect with a server."),
        (["~seed"], "~seed: generate reads no file"),
    ],
)
def test_wrong_options_are_named(words, message):
    with pytest.raises(ConfigError) as refused:
        read_options(words)
    assert message in str(refused.value)


def test_a_server_is_asked_for_what_a_model_would_be(teacher, prompts, tmp_path):
    def answered(request):
        return {"choices": [{"text": " w1 w2 \udc00", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}

    with served(tiny_model()) as server:
        server.answer = answered
        of_server = {"teacher_server_base_url": server.url, "teacher_server_model": "tiny"}
        generated = made(teacher, tmp_path / "out", prompts=prompts, top_k=5, **of_server)
    assert {row["completion"][0]["content"] for row in rows_in(tmp_path / "out")} == {"w1 w2 ?"}
    assert len(server.requests) == generated.samples == 10 and generated.tokens == 30
    asked = server.requests[0]
    assert (asked["model"], asked["max_tokens"], asked["top_k"], asked["temperature"]) == ("tiny", 24, 5, 1.0)
    assert len({request["seed"] for request in server.requests}) == 10
    tokenizer = tiny_tokenizer()
    texts = {tokenizer.decode(request["prompt"]) for request in server.requests}
    assert texts == {f"<user> {row['prompt']} <assistant>" for row in read(prompts)}


def test_a_servers_key_and_patience_are_passed_on(teacher, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", "a-secret")
    options = GenerateOptions(
        teacher_server_base_url="http://localhost:1/v1", teacher_server_api_key_env="KEY_OF_THE_TEST",
        teacher_server_timeout=3.0, teacher_server_retries=2, teacher_server_concurrency=7,
    )  # fmt: skip
    patience = ServedTeacher(teacher, options)._server.options
    assert (patience.url, patience.model, patience.api_key) == ("http://localhost:1/v1", teacher, "a-secret")
    assert (patience.timeout, patience.retries, patience.concurrency) == (3.0, 2, 7)


def asked_by(monkeypatch, teacher, folder, **options) -> list[str]:
    """The prompts that the teacher reads."""
    texts, ask, tokenizer = [], generation.LocalTeacher.ask, tiny_tokenizer()

    def heard(self, prompts, *rest):
        texts.extend(map(tokenizer.decode, prompts))
        return ask(self, prompts, *rest)

    monkeypatch.setattr(generation.LocalTeacher, "ask", heard)
    made(teacher, folder, keep_unfinished=True, **options)
    return texts


def test_prompts_are_read_with_a_system_prompt_as_they_are_and_without_answers(teacher, prompts, tmp_path, monkeypatch):
    def asked(name, **options):
        with monkeypatch.context() as patch:
            return asked_by(patch, teacher, tmp_path / name, **{"prompts": prompts, **options})

    texts = asked("system", system_prompt="w9 w8")
    assert texts and all(text.startswith("<user> w9 w8 <user> ") for text in texts)
    system = {"role": "system", "content": "w9 w8"}
    assert all(row["prompt"][0] == system for row in rows_in(tmp_path / "system"))
    given = {row["prompt"] for row in read(prompts)}
    assert set(asked("plain", plain=True)) == given >= {row["prompt"] for row in rows_in(tmp_path / "plain")}
    rows = [{"prompt": "w1", "completion": "w2"}, {"prompt": "w3", "completion": None}, {"prompt": "w4"}]
    write_rows(tmp_path / "asked.jsonl", rows)
    texts = asked("missing", prompts=str(tmp_path / "asked.jsonl"))
    assert all(any(word in text for text in texts) for word in ("w1", "w3", "w4"))


def test_prompts_come_from_the_split_that_is_named(teacher, tmp_path, monkeypatch):
    splits = (("train", "w1"), ("test", "w2"))
    for split, word in splits:
        write_rows(tmp_path / "data" / f"{split}.jsonl", [{"prompt": word}])
    for split, word in splits:
        with monkeypatch.context() as patch:
            options = {"prompts": str(tmp_path / "data"), "prompts_split": split}
            assert asked_by(patch, teacher, tmp_path / split, **options) == [f"<user> {word} <assistant>"]


@pytest.mark.parametrize("option, value", [("revision", "v2"), ("trust_remote_code", True)])
def test_where_the_teacher_comes_from_is_passed_on(teacher, prompts, tmp_path, monkeypatch, option, value):
    """To both files and weights."""
    passed = []

    def spied(cls):
        load = cls.from_pretrained

        def from_pretrained(*args, **how):
            passed.append(how[option])
            return load(*args, **{**how, "revision": "main", "trust_remote_code": False})

        monkeypatch.setattr(cls, "from_pretrained", from_pretrained)

    for cls in (AutoTokenizer, AutoModelForCausalLM):
        spied(cls)
    made(teacher, tmp_path / "out", prompts=prompts, keep_unfinished=True, **{option: value})
    assert passed == [value, value]


def sieved(samples: list[Sample], held_out_rows=(), **options) -> list[str | None]:
    chosen = GenerateOptions(**options)
    sieve = Sieve(chosen, grams_of(held_out_rows, chosen.held_out_ngram))
    reasons = [sieve.judge(sample) for sample in samples]
    assert Counter(r for r in reasons if r) == sieve.dropped and sieve.rows == reasons.count(None)
    assert sieve.examples.keys() == sieve.dropped.keys()
    return reasons


def test_each_filter_drops_what_it_names():
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    samples = [
        Sample("p", ""),
        Sample("p", "cut off here", finished=False),
        Sample("p", "one two three"),
        Sample("p", "la la la la la la la la la la"),
        Sample("p", f"he said: {text}!"),
        Sample("p", text.replace("seven", "7")),
        Sample("p", text.replace("seven", "7").upper()),
        Sample("p", text.replace("seven", "7") + " and one more"),
        Sample("another", "zero " + " ".join(reversed(text.split()))),
    ]
    reasons = sieved(samples, [{"prompt": "x", "completion": text}], min_completion_words=4, near_duplicates=0.6)
    assert reasons == [
        "empty", "unfinished", "short", "repetition", "held-out overlap", None, "duplicate", "near duplicate", None,
    ]  # fmt: skip
    assert sieved(samples[1:2], keep_unfinished=True) == [None]


def test_overlap_is_that_of_plain_loops():
    rng = random.Random(os.urandom(4))
    texts = [" ".join(rng.choices("abcd", k=rng.randint(1, 12))) for _ in range(120)]
    held_out, rows = texts[:20], texts[20:]
    n = 5

    def runs(text):
        words = text.split()
        return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}

    forbidden = set().union(*map(runs, held_out))
    samples = [Sample("prompt", text) for text in rows]
    reasons = sieved(
        samples, [{"text": text} for text in held_out], held_out_ngram=n, held_out="x", near_duplicates=1.0,
        max_repetition=1.0,
    )  # fmt: skip
    assert [r == "held-out overlap" for r in reasons] == [bool(runs(text) & forbidden) for text in rows]
    assert 0 < reasons.count("held-out overlap") < len(rows)


def test_minhash_estimates_the_jaccard_similarity():
    rng = random.Random(os.urandom(4))
    texts = [[f"w{rng.randint(0, 10**6)}" for _ in range(200)] for _ in range(3)]
    for share in (0.05, 0.2, 0.5, 0.9):
        texts.append(texts[0][: int(200 * (1 - share))] + [f"v{rng.random()}" for _ in range(int(200 * share))])
    near = NearDuplicates(0.8)
    signatures = [near.signature(text) for text in texts]

    def jaccard(a, b):
        a, b = ({tuple(x[i : i + 5]) for i in range(len(x) - 4)} for x in (a, b))
        return len(a & b) / len(a | b)

    for (a, x), (b, y) in combinations(zip(texts, signatures, strict=True), 2):
        assert abs((x == y).mean() - jaccard(a, b)) < 5 * 0.044
    near.add(signatures[0])
    assert [near.like(s) for s in signatures] == [0, None, None, 0, None, None, None]
    assert repetition(["a", "b", "c", "d"] * 3) == pytest.approx(1 - 4 / 9)
