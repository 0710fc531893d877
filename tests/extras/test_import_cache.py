"""Records of vLLM and DistillKit become a teacher cache that equals our own capture of the same model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from caches import CACHED_RUN, captured, config, end_of, files_of, other_tokenizer, teacher_model, trainer_of
from commands import without_report
from datasets import Dataset
from foreign_records import (
    DELTAS,
    EXACT,
    LOSSY,
    answer_of,
    compressed,
    distillkit_row,
    framed,
    output_of,
    write_distillkit,
    write_lines,
    write_vllm_parquet,
)
from quick_cases import slow_but
from tiny import VOCAB, chats, completions, texts, tiny_model, tiny_tokenizer
from trainings import step

from liger_trainer.errors import ConfigError, DataError
from liger_trainer.extras.foreign_caches.distillkit_records import Compression, unpacked
from liger_trainer.extras.foreign_caches.import_cache import import_cache
from liger_trainer.extras.foreign_caches.vllm_records import VLLMRecords
from liger_trainer.teachers.cache.store import INDEX, TeacherCache, read_index
from liger_trainer.teachers.row_keys import documents
from liger_trainer.trainers import capture as cache_capture
from liger_trainer.trainers.row_preparation import prepare_rows

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
STEP = {"cache_bits": 16, "max_steps": 1, "optim": "sgd", "learning_rate": 0.0, "bf16": False}


def token_rows(data, **options):
    """The rows' tokens as the trainer makes them, without packing."""
    args = config("nowhere", **options)
    return [d.input_ids.tolist() for d in documents(prepare_rows(args, tiny_tokenizer(), data).datasets["train"])]


def outputs(data, k=9, **options):
    return [output_of(teacher_model(), ids, k) for ids in token_rows(data, **options)]


def imported(folder, records, tool="vllm", data=None, compression=None, **options):
    args = config(folder, **options)
    import_cache(records, tool, args, tiny_tokenizer(), data or completions(), compression=compression)
    return args


def decoded(folder):
    """All that a cache says, by key."""
    cache = TeacherCache(folder, verify=True)
    keys = [row.astype(">u8").tobytes() for row in cache._keys]
    return cache, {key: cache.format.decode(cache.records(key)) for key in keys}


def assert_same_caches(got, want, labels=True):
    (cache, mine), (other, theirs) = decoded(got), decoded(want)
    assert mine.keys() == theirs.keys() and cache.index.tokens == other.index.tokens
    for key, expected in theirs.items():
        assert torch.equal(mine[key].ids, expected.ids)
        torch.testing.assert_close(mine[key].log_probs, expected.log_probs, rtol=1e-3, atol=1e-3)
        if labels:
            torch.testing.assert_close(mine[key].label_log_prob, expected.label_log_prob, rtol=1e-3, atol=1e-3)


def in_pairs(made):
    choices = [answer_of(each)["choices"] for each in made]
    return [{"choices": first + second} for first, second in zip(choices[::2], choices[1::2], strict=True)]


FORMS = {
    "outputs": lambda folder, made: write_lines(folder / "a.jsonl", made),
    "completions": lambda folder, made: write_lines(folder / "a.jsonl", map(answer_of, made)),
    "batch run": lambda folder, made: write_lines(folder / "a.jsonl", [framed(answer_of(each)) for each in made]),
    "two in an answer": lambda folder, made: write_lines(folder / "a.jsonl", in_pairs(made)),
    "two files": lambda folder, made: write_lines(folder / "d" / "a.jsonl", made[:7]).parent
    if write_lines(folder / "d" / "b.json", made[7:]) else None,
    "text in Parquet": lambda folder, made: write_vllm_parquet(folder / "a.parquet", made, "text"),
    "structs in Parquet": lambda folder, made: write_vllm_parquet(folder / "a.parquet", made, "struct"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Our own capture, and what vLLM says about the same rows."""
    folder = tmp_path_factory.mktemp("ours")
    captured(folder / "c", completions(), cache_entries=9, cache_bits=16)
    return folder / "c", outputs(completions())


@pytest.mark.parametrize("form", slow_but(FORMS, "outputs", "completions", "two files", "structs in Parquet"))
def test_vllms_records_are_our_own_capture(ours, tmp_path, form):
    capture, made = ours
    imported(tmp_path / "c", FORMS[form](tmp_path, made), cache_bits=16)
    assert_same_caches(tmp_path / "c", capture)
    index = read_index(tmp_path / "c")
    assert index.settings.unknown == ("entropy",) and index.settings.entries == 9
    assert index.fingerprints.teacher_from == "vllm"
    assert index.teacher.name == "teacher-7b" or form not in ("completions", "batch run")
    if form != "outputs":
        return
    (logs, got), (truth, want) = (step(trainer_of(config(folder, **STEP))) for folder in (tmp_path / "c", capture))
    assert "teacher_entropy" in truth and "teacher_entropy" not in logs
    for name in ("loss", "forward_kl", "agreement_at_1", "teacher_perplexity"):
        assert logs[name] == pytest.approx(truth[name], rel=1e-3), name
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-2, atol=1e-4, msg=name)


def test_distillkits_records_are_our_own_capture(ours, tmp_path):
    rows = [distillkit_row(teacher_model(), ids, EXACT) for ids in token_rows(completions())]
    imported(tmp_path / "c", write_distillkit(tmp_path / "d", rows, EXACT), "distillkit", cache_bits=16)
    assert_same_caches(tmp_path / "c", ours[0], labels=False)
    assert read_index(tmp_path / "c").settings.unknown == ("label_log_prob", "entropy")
    (logs, _), (truth, _) = (step(trainer_of(config(folder, **STEP))) for folder in (tmp_path / "c", ours[0]))
    assert logs["loss"] == pytest.approx(truth["loss"], rel=1e-3)
    assert {"teacher_entropy", "teacher_perplexity"} & logs.keys() == set()


def test_ids_that_were_sent_stand_beside_an_answer_without_them(tmp_path):
    output = output_of(teacher_model(), [3, 5, 9], 4)
    answer = {**answer_of(output), "prompt_token_ids": [3, 5, 9]}
    answer["choices"][0]["prompt_token_ids"] = None
    (row,) = VLLMRecords(write_lines(tmp_path / "a.jsonl", [answer])).rows()
    assert row.ids.tolist() == [3, 5, 9] and row.entries == 4


BIN = {"scale_dtype": "float32", "num_elements": 3}
UNALIGNED = {
    "d": 64, "k": 6, "exact_k": 0, "exact_dtype": "float32", "delta_encoding": False,
    "residual_bins": [{**BIN, "element_bits": 5}, {**BIN, "element_bits": 6}],
}  # fmt: skip


@pytest.mark.parametrize("how", [LOSSY, DELTAS, UNALIGNED], ids=["polynomial", "deltas", "no exact ones"])
def test_distillkits_compression(tmp_path, how):
    """The import reads the numbers that its bytes stand for: bins of several widths, terms, what no bin corrects."""
    log_probs = torch.randn(40, how["d"]).mul(2).double().log_softmax(-1).topk(how["k"], -1).values
    packed, truth = zip(*(compressed(row.numpy(), how) for row in log_probs), strict=True)
    made = Compression.of(how)
    assert made.widths == (len(packed[0]), -(-how["k"] * 6 // 8))
    got = made.log_probs(np.array(packed, np.uint8))
    np.testing.assert_allclose(got, np.stack(truth), rtol=1e-5, atol=1e-5)
    alone = made.log_probs(np.array(packed[:1], np.uint8))  # one place: its numbers lie at odd bytes
    np.testing.assert_array_equal(alone, got[:1])
    assert np.abs(got - log_probs.numpy()).max() < 3.0


@pytest.mark.parametrize("bits", [1, 3, 8, 17, 18, 25])
def test_bits(bits):
    numbers = np.random.default_rng(bits).integers(0, 2**bits, (5, 7))
    text = ["".join(format(n, f"0{bits}b") for n in row) for row in numbers]
    padded = [row + "0" * (-len(row) % 8) for row in text]
    packed = np.array([[int(row[i : i + 8], 2) for i in range(0, len(row), 8)] for row in padded], np.uint8)
    assert (unpacked(packed, bits, 7) == numbers).all()


DATA = {
    "text": (lambda: texts(10), {}),
    "chats": (lambda: chats(10), {"assistant_only_loss": True}),
    "packed": (lambda: completions(10), {"packing": True, "max_length": 48}),
    "cut shorter": (lambda: texts(10), {"max_length": 7}),
}


@pytest.mark.parametrize("tool", ["vllm", "distillkit"])
@pytest.mark.parametrize("form", slow_but(DATA, "chats", "packed"))
def test_rows_of_every_form(tmp_path, form, tool):
    """What was read whole serves rows that are cut; DistillKit's row lacks the last token and has padding there."""
    make, options = DATA[form]
    rows = token_rows(make(), **{**options, "packing": False, "max_length": 1024})
    captured(tmp_path / "ours", make(), cache_entries=9, cache_bits=16, **options)
    if tool == "vllm":
        records = write_lines(tmp_path / "a.jsonl", [output_of(teacher_model(), ids, 9) for ids in rows])
    else:
        padded = [[*ids[:-1], 0] for ids in rows]
        records = write_distillkit(tmp_path / "d", [distillkit_row(teacher_model(), r, EXACT) for r in padded], EXACT)
    imported(tmp_path / "c", records, tool, make(), cache_bits=16, **options)
    assert_same_caches(tmp_path / "c", tmp_path / "ours", labels=tool == "vllm")


def test_the_whole_vocabulary_and_a_part_of_what_is_there(tmp_path):
    """All tokens leave no rest; of nine, four are taken, and the others are of the rest."""
    made = write_lines(tmp_path / "a.jsonl", outputs(completions(), VOCAB))
    imported(tmp_path / "c", made, cache_bits=16)
    captured(tmp_path / "ours", completions(), cache_entries=64, cache_bits=16)
    (_, mine), (_, theirs) = decoded(tmp_path / "c"), decoded(tmp_path / "ours")
    for key, want in theirs.items():
        torch.testing.assert_close(mine[key].log_probs.exp().sum(-1), want.log_probs.exp().sum(-1), rtol=0, atol=1e-5)
    imported(tmp_path / "four", made, cache_entries=4, cache_bits=16)
    captured(tmp_path / "our_four", completions(), cache_entries=4, cache_bits=16)
    assert_same_caches(tmp_path / "four", tmp_path / "our_four")


def at(place, change):
    """A change of what the first row lists at a place."""
    return lambda rows: change(rows[0]["prompt_logprobs"][place])


def listing(token, log_prob):
    return lambda listed: listed.update({token: {"logprob": log_prob, "rank": 1}})


def all_of(log_prob):
    return lambda listed: [entry.update(logprob=log_prob) for entry in listed.values()]


def another_token(rows):
    listed = rows[0]["prompt_logprobs"][2]
    rows[0]["prompt_token_ids"][2] = next(token for token in range(VOCAB) if str(token) not in listed)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda rows: rows.pop(3), ConfigError, r"has no records of 1 of 24 rows. The first is row \d+ of the train"),
        (another_token, DataError, r"a.jsonl:1: at place 2 stands token \d+, and prompt_logprobs does not list it"),
        (lambda rows: rows[0]["prompt_logprobs"].pop(), DataError, r"a.jsonl:1 has \d+ tokens in prompt_token_ids and"),
        (lambda rows: rows[1].pop("prompt_token_ids"), ConfigError, "a.jsonl:2 has no prompt_token_ids.*return_token"),
        (lambda rows: rows[1].pop("prompt_logprobs"), DataError, "a.jsonl:2 has no prompt_logprobs; it has request_id"),
        (lambda rows: rows.__setitem__(1, [1, 2]), DataError, "a.jsonl:2 is no answer of vLLM: expected an object"),
        (lambda rows: rows[0]["prompt_logprobs"].__setitem__(4, 7), DataError, "a.jsonl:1: place 4 of prompt_logprobs"),
        (at(6, listing("70", -1.0)), ConfigError, "a.jsonl:1 lists token 70, and the student's tokenizer has 64"),
        (at(6, listing("50", 0.4)), DataError, "a.jsonl:1: at place 6, the probabilities add up to .*1 at most"),
        (at(6, all_of(float("nan"))), DataError, "a.jsonl:1: at place 6, the log-probabilities are NaN"),
        (at(6, all_of(-float("inf"))), DataError,
         "a.jsonl:1: at place 6, the log-probabilities are NaN, or -inf for every"),
    ],
)  # fmt: skip
def test_vllms_records_that_are_refused(ours, tmp_path, change, error, message):
    rows = json.loads(json.dumps(ours[1]))
    change(rows)
    with pytest.raises(error, match=message):
        imported(tmp_path / "c", write_lines(tmp_path / "a.jsonl", rows))
    assert not (tmp_path / "c" / INDEX).is_file() or not read_index(tmp_path / "c").finished


def test_the_token_that_stands_there_is_no_likely_one_for_that(tmp_path):
    """vLLM lists it besides the k likeliest, with its rank among all; a tie with the last of them counts."""
    likely = {"4": {"logprob": -0.5, "rank": 1}, "7": {"logprob": -1.5, "rank": 2}}
    for rank, entries in ((40, 2), (3, 3), (None, 3)):
        places = [None, {"9": {"logprob": -6.0, "rank": rank}, **likely}]
        file = write_lines(tmp_path / "a.jsonl", [{"prompt_token_ids": [5, 9], "prompt_logprobs": places}])
        records = VLLMRecords(file)
        assert [row.entries for row in records.rows()] == [entries]
        listed = records.listed(0, np.array([1]), 2)
        assert listed.ids.tolist() == [[4, 7]] and listed.labels.tolist() == [-6.0]


def test_places_that_list_fewer(ours, tmp_path):
    """By default the fewest; a number that is not there is refused."""
    rows = json.loads(json.dumps(ours[1]))
    for row in rows:
        own = str(row["prompt_token_ids"][6])
        row["prompt_logprobs"][6] = {token: x for token, x in row["prompt_logprobs"][6].items() if token == own}
    with pytest.raises(ConfigError, match="cache_entries is 9, and .*a.jsonl lists [01] tokens at some place"):
        imported(tmp_path / "c", write_lines(tmp_path / "a.jsonl", rows), cache_entries=9)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What DistillKit records of four rows."""
    rows = [distillkit_row(teacher_model(), ids, EXACT) for ids in token_rows(completions(4))]
    return write_distillkit(tmp_path_factory.mktemp("four") / "d", rows, EXACT)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"d": 300}, r"/d, row \d+ has 7 bytes a place in bytepacked_indices, and .* \(d 300, k 9\) there are 11"),
        ({"exact_dtype": "bfloat16"}, "36 bytes a place in compressed_logprobs, and .* there are 18"),
        ({"k": 4}, "k 4 is less than exact_k 9"),
        ({"kk": 4}, "unknown key kk"),
        ({"exact_dtype": "int8"}, "expected one of float16, bfloat16, float32, float64, got int8"),
        ({"polynomial_terms": ["sin"]}, "polynomial_terms are powers, or sqrt, exp"),
    ],
)
def test_distillkits_compression_that_is_not_the_records(four, tmp_path, change, message):
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"teacher": {"logprob_compressor": {**EXACT, **change}}}))
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path / "c", four, "distillkit", completions(4), tmp_path / "other.yaml")


def test_distillkits_compression_in_another_file(four, tmp_path):
    folder = Path(shutil.copytree(four, tmp_path / "d"))
    (folder / "compression_config.yaml").unlink()
    with pytest.raises(ConfigError, match="compression_config.yaml is not there"):
        imported(tmp_path / "d2", folder, "distillkit", completions(4))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"teacher": {"logprob_compressor": EXACT}}))
    imported(tmp_path / "e", folder, "distillkit", completions(4), tmp_path / "run.yaml")


def test_what_cannot_be_imported(ours, tmp_path):
    file, other = write_lines(tmp_path / "a.jsonl", ours[1]), {"tool": "distillkit"}
    maps = write_vllm_parquet(tmp_path / "maps.parquet", ours[1], "map")
    for records, options, message in (
        (file, {"temperature": 2.0}, "the records are of temperature 1, the loss is of 2.0"),
        (file, {"cache_tail_draws": 4}, "leave cache_kind at topk, and cache_tail_draws out; got topk, 4"),
        (file, {"cache_kind": "sampled", "cache_tail_draws": None}, "leave cache_kind at topk"),
        (file, {"teacher_model_name_or_path": "x"}, "teacher_model_name_or_path: records are imported"),
        (tmp_path / "nothing.jsonl", {}, "nothing.jsonl: no such file or folder"),
        (file, {"compression": file}, "compression: only DistillKit's records"),
        (file, other, "expected a Parquet file of DistillKit"),
        (maps, {}, "maps.parquet cannot be read .*Write prompt_logprobs as JSON text"),
    ):
        with pytest.raises(ConfigError, match=message):
            imported(tmp_path / "c", records, **options)
    args = imported(tmp_path / "c", file)
    with pytest.raises(ConfigError, match="was imported from records of vllm, which cannot be compared"):
        trainer_of(args, teacher=teacher_model())
    with pytest.raises(ConfigError, match="holds a finished teacher cache"):
        imported(tmp_path / "c", file)


def test_the_teachers_tokenizer_is_compared_where_it_is_named(ours, tmp_path):
    file = write_lines(tmp_path / "a.jsonl", ours[1])
    tiny_tokenizer().save_pretrained(tmp_path / "same")
    imported(tmp_path / "c", file, teacher_tokenizer_name_or_path=str(tmp_path / "same"))
    args = config(tmp_path / "d", teacher_tokenizer_name_or_path=str(tmp_path / "same"))
    with pytest.raises(ConfigError, match="tokens that the teacher's lacks .*w1000"):
        import_cache(file, "vllm", args, other_tokenizer(), completions())


def test_an_import_that_was_interrupted_goes_on(ours, tmp_path, monkeypatch):
    file = write_lines(tmp_path / "a.jsonl", ours[1])
    monkeypatch.setattr(cache_capture, "MIB", 512)
    imported(tmp_path / "whole", file, cache_shard_mb=1)

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    args = config(tmp_path / "c", cache_shard_mb=1)
    with pytest.raises(KeyboardInterrupt):
        import_cache(file, "vllm", args, tiny_tokenizer(), completions(), None, stop)
    assert 0 < read_index(tmp_path / "c").tokens_read < read_index(tmp_path / "whole").tokens
    with pytest.raises(ConfigError, match="settings.bits: 8 there, 16 now"):
        imported(tmp_path / "c", file, cache_shard_mb=1, cache_bits=16)
    imported(tmp_path / "c", file, cache_shard_mb=1)
    assert files_of(tmp_path / "c") == files_of(tmp_path / "whole")


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    tiny_model(seed=0).save_pretrained("student")
    tiny_tokenizer().save_pretrained("student")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2}"} for i in range(20)]
    write_lines(Path("rows.jsonl"), rows)
    Path("run.yaml").write_text(CACHED_RUN)
    teacher = tiny_model(seed=1)
    made = [output_of(teacher, ids, 12) for ids in token_rows(Dataset.from_list(rows))]
    write_lines(Path("records.jsonl"), map(answer_of, made))
    command = "cache", "import", "run.yaml", "--from", "vllm"
    code, said = end_of(capsys, *command, "--records", "records.jsonl", "--cache_bits", "16")
    assert code == 0, said
    assert "teacher-7b, from records of vllm" in said and "the likeliest 12 tokens" in said
    assert "without the entropies" in said
    assert end_of(capsys, "cache", "verify", "cache")[0] == 0
    assert end_of(capsys, "run", "run.yaml")[0] == 0
    result = json.loads(Path("out/metrics.json").read_text())
    assert result["after"]["forward_kl"] < result["before"]["forward_kl"]
    assert "teacher_entropy" not in result["after"] and "teacher_perplexity" in result["after"]
    code, said = end_of(capsys, *command, "--records", "nothing.jsonl", "teacher_cache_dir=other")
    assert code == 2 and "nothing.jsonl: no such file or folder" in said
    code, said = end_of(capsys, "cache", "import", "run.yaml", "--records", "records.jsonl")
    assert code == 2 and "--from" in said
