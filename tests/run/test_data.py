"""Rows of a run: every source, every split rule, and what each kind of wrong row is told."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace

import datasets
import pyarrow
import pytest
from commands import call, lines, settings
from malformed import TEN_KINDS, located, malformed
from PIL import Image
from tiny import tiny_model, tiny_tokenizer

from liger_trainer.config.run_config import load_run_config
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.trainers.chat_rows import in_messages

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEXTS = [{"text": f"row {i}"} for i in range(20)]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write files, then load what `dataset_name` names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\n")

    def load_data(name: str, files: dict[str, str | bytes] | None = None, *overrides: str):
        for path, text in (files or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(text.encode() if isinstance(text, str) else text)
        return load_run_datasets(load_run_config("run.yaml", [f"dataset_name={name}", *overrides]))

    return load_data


def test_a_file_is_split_by_the_seed_and_hashed_as_json_lines(load):
    data = load("rows.jsonl", {"rows.jsonl": lines(TEXTS)}, "holdout_fraction=0.2")
    assert (data.facts.train_rows, data.facts.test_rows) == (16, 4) == (len(data.train), len(data.test))
    assert {row["text"] for row in [*data.train, *data.test]} == {row["text"] for row in TEXTS}
    assert data.facts.held_out == "20.0% of the rows, drawn with seed 42"
    again = load("rows.jsonl", None, "holdout_fraction=0.2")
    assert again.facts == data.facts and again.test["text"] == data.test["text"]
    other = load("rows.jsonl", None, "holdout_fraction=0.2", "seed=1")
    assert other.test["text"] != data.test["text"]
    text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in [*data.train, *data.test])
    assert data.facts.sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        ([{"messages": CHAT}] * 2, "messages"),
        ([{"prompt": CHAT[:1], "completion": CHAT[1:]}] * 2, "prompt-completion"),
        ([{"prompt": "a", "completion": "b"}] * 2, "prompt-completion"),
        ([{"conversations": [{"from": "human", "value": "a"}]}] * 2, "messages"),
        ([{"instruction": "a", "output": "b"}] * 2, "prompt-completion"),
        ([{"text": "a", "prompt": "stray"}] * 2, "text"),
        ([{"input_ids": [1, 2], "labels": [-100, 2]}] * 2, "input_ids"),
    ],
)
def test_forms(load, rows, form):
    facts = load("rows.jsonl", {"rows.jsonl": lines(rows)}).facts
    assert facts.form == form
    assert set(facts.columns) == set(rows[0])
    assert set(facts.columns_used) == set(rows[0]) - ({"prompt"} if form == "text" else set())
    assert facts.test_rows_seen_in_training == 1  # both rows are the same


@pytest.mark.parametrize("key", ["weight_column", "teacher_prompt_column"])
def test_columns_that_settings_name_are_kept(load, key):
    """Beside those of the form. What is repeated and what the hash is of does not depend on them."""
    files = {
        split: lines([{"text": f"{split} {i % 2}", "extra": f"{i}", "stray": i} for i in range(3)])
        for split in ("train", "test")
    }
    where = {f"rows/{split}.jsonl": text for split, text in files.items()}
    teacher = ["teacher_model_name_or_path=t"]
    plain, data = load("rows", where, *teacher), load("rows", where, *teacher, f"{key}=extra")
    assert data.train.column_names == data.test.column_names == ["text", "extra"]
    assert (plain.facts.sha256, plain.facts.train_rows_repeated) == (data.facts.sha256, 1)
    assert data.facts.columns_used == ("text", "extra")
    with pytest.raises(DataError, match=f"no column 'other', which {key} names; they have text, extra, stray"):
        load("rows", None, *teacher, f"{key}=other")
    where["rows/test.jsonl"] = lines([{"text": "x"}])
    if key == "weight_column":  # evaluations are not weighted
        assert load("rows", where, *teacher, f"{key}=extra").test.column_names == ["text"]
    else:
        with pytest.raises(DataError, match="held-out rows have no column 'extra'"):
            load("rows", where, *teacher, f"{key}=extra")


def test_repeated_rows_are_counted(load):
    rows = [{"text": text, "source": i} for i, text in enumerate("a b a a c b d".split())]  # the text alone counts
    files = {"d/train.jsonl": lines(rows), "d/test.jsonl": lines(rows[1:4])}
    facts = load("d", files).facts
    assert (facts.train_rows_repeated, facts.test_rows_repeated, facts.test_rows_seen_in_training) == (3, 1, 3)


def test_other_formats(load):
    csv = load("rows.csv", {"rows.csv": "prompt,completion\na,b\nc,d\n"})
    assert csv.facts.form == "prompt-completion"
    cells = "prompt,completion,w\n6*7?,42,1\n007,NA,2\n1,null,3\n2,1.50,4\n"
    csv = load("rows.csv", {"rows.csv": cells}, "weight_column=w")
    pairs = {"6*7?": "42", "007": "NA", "1": "null", "2": "1.50"}
    assert {r["prompt"]: r["completion"] for r in [*csv.train, *csv.test]} == pairs
    assert all(isinstance(r["w"], int) for r in csv.train)
    text = load("rows.txt", {"rows.txt": "one\n\ntwo\nthree\n"})
    assert sorted([*text.train["text"], *text.test["text"]]) == ["one", "three", "two"]
    assert text.facts.blank_lines_skipped == 1
    datasets.Dataset.from_list(TEXTS).to_parquet("rows.parquet")
    for name, files in (("rows.json", {"rows.json": json.dumps(TEXTS)}), ("rows.parquet", None)):
        assert load(name, files).facts.train_rows == 19
    mixed = {"data/a.csv": "text,n\na,1\n42,2\n",
             "data/b.jsonl": lines([{"text": "c", "n": "x"}, {"text": "d", "n": {"k": 1}}])}  # fmt: skip
    data = load("data", mixed)
    assert sorted([*data.train["text"], *data.test["text"]]) == ["42", "a", "c", "d"]


def zipped(content: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names or ("rows",):
            archive.writestr(name, content)
    return file.getvalue()


def by_zstandard(content: bytes) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(content)
    return packed.getvalue().to_pybytes()


PACK = {"": bytes, ".GZ": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": by_zstandard,
        ".zip": zipped}  # fmt: skip


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("ending", ["json", "jsonl", "ndjson", "csv", "tsv", "txt"])
def test_a_text_file_by_its_ending_packed_or_not(load, tmp_path, ending, packed):
    """A comma, a quoted tab and a line separator lie in texts; a file of a folder has its split by its name."""
    texts = ["a, b", "c\td", "e\u2028f", "42"]
    rows = [{"text": text} for text in texts]
    separator = {"csv": ",", "tsv": "\t"}.get(ending)
    table = "".join(f'"{text}"{separator}{i}\n' for i, text in enumerate(texts))
    content = {"json": json.dumps(rows), "txt": "\n".join(texts)}.get(ending, lines(rows))
    content = f"text{separator}n\n{table}" if separator else content
    folder, name = tmp_path / "d", f"train-0.{ending}{packed}"
    folder.mkdir()
    for file in (tmp_path / name, folder / name):
        file.write_bytes(PACK[packed](content.encode()))
    (folder / "test.jsonl").write_text(lines(rows[:1]))
    data = load(name)
    assert sorted([*data.train["text"], *data.test["text"]]) == sorted(texts)
    data = load("d")
    assert data.train["text"] == texts and data.test["text"] == texts[:1]


def test_wrong_rows_of_packed_files_have_their_line(load, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text"\n'))
    with pytest.raises(DataError, match="a.jsonl.gz:2: not valid JSON"):
        load("a.jsonl.gz")
    for content in (gzip.compress(b"a" * 99)[:-9], zipped(b"a", "a", "b"), by_zstandard(b"a" * 99)[:-9]):
        (tmp_path / "b.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match="b.jsonl.gz: cannot be unpacked or decoded: "):
            load("b.jsonl.gz")
    with pytest.raises(ConfigError, match="a.parquet.gz: expected a file ending in .json, .*, but for the last three"):
        load("a.parquet.gz", {"a.parquet.gz": "x"})
    with pytest.raises(ConfigError, match="no such file or directory: nowhere.tsv.gz"):
        load("nowhere.tsv.gz")


@pytest.mark.parametrize("chat", [{"messages": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]}])
def test_tools_in_openais_older_column_are_named(load, chat):
    row = {**chat, "functions": [{"name": "add", "parameters": {}}]}
    with pytest.raises(DataError, match="a column functions.*Give them a column tools"):
        load("rows.jsonl", {"rows.jsonl": lines([row] * 4)})
    with pytest.raises(DataError, match="a column functions.*Give them a column tools"):
        in_messages(datasets.Dataset.from_list([row]))
    tools = [{"type": "function", "function": row["functions"][0]}]
    assert load("rows.jsonl", {"rows.jsonl": lines([{**row, "tools": tools}] * 4)}).facts.train_rows == 3
    load("rows.jsonl", {"rows.jsonl": lines([{"text": "a", "functions": "of x"}] * 4)})


def test_directories(load, tmp_path):
    files = {"d/train.jsonl": lines(TEXTS[:5]), "d/test.jsonl": lines(TEXTS[5:7])}
    data = load("d", files)
    assert data.train["text"] == [row["text"] for row in TEXTS[:5]] and len(data.test) == 2
    assert data.facts.held_out == "split 'test'"
    shards = {"s/part-1.jsonl": lines(TEXTS[:5]), "s/part-2.jsonl": lines(TEXTS[5:])}
    assert load("s", shards).facts.train_rows == 19
    datasets.Dataset.from_list(TEXTS).save_to_disk("saved")
    assert load("saved").facts.train_rows == 19
    splits = {"train": datasets.Dataset.from_list(TEXTS[:9]), "dev": datasets.Dataset.from_list(TEXTS[9:])}
    datasets.DatasetDict(splits).save_to_disk("dict")
    assert load("dict", None, "dataset_test_split=dev").facts.test_rows == 11
    with pytest.raises(ConfigError, match="command line: dataset_test_split: no split 'nope'; .*'train', 'dev'"):
        load("dict", None, "dataset_test_split=nope")
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(DataError, match="saved: cannot be read as the output of save_to_disk"):
        load("saved")
    with pytest.raises(ConfigError, match=r"files of no split \(extra.jsonl\)"):
        load("d", {"d/extra.jsonl": lines(TEXTS)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds no dataset"):
        load("empty")


SPLITS = ("train", "test")
SHARD = "-00000-of-00001.jsonl"


def where_rows_are(load, *files: str) -> dict[str, set[str]]:
    """Load the folder `d` of these files, each with rows of its own, and return whose rows each split has."""
    data = load("d", {f"d/{file}": lines([{"text": f"{file} {i}"} for i in range(3)]) for file in files})
    return {
        name: {text.split()[0] for text in rows["text"]} for name, rows in (("train", data.train), ("test", data.test))
    }


@pytest.mark.parametrize(
    ("train", "test", "others"),
    [
        ("train/a.jsonl", "test/a.jsonl", ()), (f"data/train{SHARD}", f"data/test{SHARD}", ()),
        ("my_train.jsonl", "my_test.jsonl", ()), ("trainset.jsonl", "testset.jsonl", ()),
        ("trainRows.jsonl", "rowsTest.jsonl", ()), ("trainval.jsonl", "testing1.jsonl", ()),
        ("train_sft.jsonl", "Validation-2.jsonl", ()),
        ("train.jsonl", "eval.jsonl", ("config.json", ".train.jsonl", "out/trainer_state.json", "__MACOSX/a.jsonl")),
        ("train.jsonl", None, ("samples/index.json", "samples/part-000000.jsonl")),
        (f"main/train{SHARD}", f"main/test{SHARD}", ()), ("x/data.jsonl", None, ()),
        ("train.jsonl", "test.jsonl", ("validation.jsonl",)), ("latest.jsonl", None, ("dataset_info.json",)),
    ],
)  # fmt: skip
def test_held_out_files_of_a_folder_are_never_trained_on(load, train, test, others):
    assert where_rows_are(load, train, *([test] if test else []), *others) == {
        "train": {train},
        "test": {test or train},
    }


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (("rows.jsonl", "rows_eval.jsonl"), r"holds files of no split \(rows.jsonl\) next to others"),
        (("de/train.jsonl", "en/train.jsonl"), "split 'train' in several folders; name one of them: d/de, d/en"),
        (("a.jsonl", "more/b.jsonl"), "in several folders; name one of them: d, d/more"),
        ((f"data/train_sft{SHARD}", f"data/train_gen{SHARD}"), "has 'train_gen', 'train_sft'"),
        (("a.jsonl", "b.xlsx"), "d/b.xlsx would not be read with the others"),
        (("test.jsonl",), "no split 'train'; the dataset has 'test'"),
        (("config.json", "tokenizer.json"), "d holds no dataset"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_say_what_to_train_on(load, files, complaint):
    with pytest.raises(ConfigError, match=complaint):
        where_rows_are(load, *files)


def test_files_by_a_pattern(load):
    files = {f"d/{name}.jsonl": lines(TEXTS) for name in ("a1", "a2", "b1")}
    assert load("d/a*.jsonl", {**files, "d/b.xlsx": "x"}).facts.train_rows == 38
    assert load("d/?1.jsonl").facts.train_rows == 38 and load("d/a[1].jsonl").facts.train_rows == 19
    with pytest.raises(ConfigError, match=r"no such file or directory: d/c\*.jsonl: no file has a name like that"):
        load("d/c*.jsonl")
    load("a[1].jsonl", {"a[1].jsonl": lines(TEXTS)})  # a file of this very name


def test_rows_beside_images_that_they_name(load, tmp_path):
    (tmp_path / "d/train").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "d/train/a.png")
    data = load("d", {"d/train/metadata.jsonl": lines([{"file_name": "a.png", "text": "a"}] * 3)})
    assert data.facts.images == "image" and data.train[0]["image"].size == (4, 4)


def test_contents_say_more_than_names(load, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(lines(TEXTS).encode()))
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": TEXTS}))
    datasets.Dataset.from_list(TEXTS).to_parquet("c.csv")
    (tmp_path / "d.jsonl").write_bytes(lines(TEXTS).encode("utf-16"))
    (tmp_path / "e.csv").write_bytes("\ufeffprompt;completion\r\na, b;c\r\nd;e\r\n".encode("utf-16-le"))
    (tmp_path / "rows.jsonl.txt").write_text(lines(TEXTS))  # what an editor makes of rows.jsonl
    for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl", "rows.jsonl.txt"):
        assert load(name).facts.train_rows == 19, name
    for encoding in ("utf-16-le", "utf-16-be", "utf-32"):  # text of letters alone would be UTF-8 with zeros in it
        (tmp_path / "i.txt").write_bytes("one\ntwo\nthree\n".encode(encoding))
        assert {*load("i.txt").train["text"]} < {"one", "two", "three"}, encoding
    assert dict(load("e.csv").train[0]) in ({"prompt": "a, b", "completion": "c"}, {"prompt": "d", "completion": "e"})
    for name, content, complaint in (
        ("f.parquet", "version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS.* git lfs pull"),
        ("g.json", '["a", "b"]', "g.json, row 0: expected a JSON object, got text"),
        ("g.json", '{"data": [{"text": "a"}, "b"]}', "g.json, row 1: expected a JSON object, got text"),
        ("g.json", '[{"text": "caf\xe9"}]'.encode("cp1252"), "expected UTF-8 text: .*. Save the file as UTF-8"),
        (
            "h.csv",
            'prompt,completion\n"say \\"hi\\"",b\n',
            "h.csv:2: .*A quote within a text in quotes is written twice",
        ),
        ("h.csv", 'prompt,completion\n"a,b\nc,d\n', "h.csv:3: .*A quote within a text in quotes is written twice"),
        ("h.csv", "prompt,prompt,completion\na,b,c\n", "names the column 'prompt' twice"),
    ):
        with pytest.raises(DataError, match=complaint):
            load(name, {name: content})
    (tmp_path / "d").mkdir()
    (tmp_path / "d/gone.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match="gone.jsonl: cannot be opened: No such file"):
        load("d")


@pytest.mark.parametrize("types", [None, datasets.Features(text=datasets.Value("string"))])
def test_parquet_without_rows(load, tmp_path, types):
    (tmp_path / "d").mkdir()
    datasets.Dataset.from_dict({"text": []}, features=types).to_parquet("d/part-0.parquet")
    with pytest.raises(DataError, match="part-0.parquet: split 'train' has no rows"):
        load("d/part-0.parquet")
    datasets.Dataset.from_list(TEXTS).to_parquet("d/part-1.parquet")  # a writer's empty part beside others
    assert load("d").facts.train_rows == 19


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, "'loss_mask' has a value for each token.* completion_mask"),
        ({"input_ids": [1, 2, 3], "weights": [0, 0.5, 1]}, "'weights' has a value for each token"),
        (
            {"messages": CHAT, "loss_mask": [0] * len(CHAT)},
            "'loss_mask' has a value for each message.* weight of 0 or 1",
        ),
        ({"messages": CHAT, "audios": ["a.wav"]}, "'audios' is not read: chats are learned with text and images"),
        ({"messages": CHAT, "audios": [], "loss_mask": [0] * 9, "weights": 1}, None),
        ({"input_ids": [1, 2, 3], "special_tokens_mask": [0, 0, 0], "token_type_ids": [0, 0, 0]}, None),
    ],
)
def test_columns_that_say_what_is_learned_and_are_not_read(load, row, complaint):
    files = {"rows.jsonl": lines([row] * 3)}
    if complaint is None:
        assert load("rows.jsonl", files).facts.train_rows == 2
        return
    with pytest.raises(DataError, match=complaint):
        load("rows.jsonl", files)


def test_a_system_prompt_is_read_by_both_of_its_names(load):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    alpaca = {"instruction": "a", "output": "b"}
    for form, place in (({"messages": chat}, "messages"), ({"prompt": chat[:1], "completion": chat[1:]}, "prompt"),
                        (alpaca, "prompt")):  # fmt: skip
        data = load("rows.jsonl", {"rows.jsonl": lines([{**form, "system_prompt": "s"}] * 3)})
        assert data.train[0][place][0] == {"role": "system", "content": "s"}, form
        assert "system" in data.facts.columns_used


def test_a_mixture_of_trl(load):
    files = {"a.jsonl": lines(TEXTS)}
    data = load("null", files, "datasets=[{path: json, data_files: a.jsonl}]", "test_split_size=0.5")
    assert (data.facts.train_rows, data.facts.test_rows) == (10, 10)
    assert data.facts.held_out == "50% of the rows, drawn by TRL"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (
            "{path: a.jsonl}",
            "a.jsonl is a file; name its kind as path .json, csv, parquet or text., and the file: data_files: a.jsonl",
        ),
        ("{path: json, data_files: a.jsonl}", "datasets: the mixture could not be loaded: "),
    ],
)
def test_a_mixture_that_cannot_be_read(load, entry, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load("null", {"a.jsonl": '{"text": '}, f"datasets=[{entry}]")


def test_the_demo_keeps_its_own_split(load, monkeypatch):
    train, test = (datasets.Dataset.from_list(rows) for rows in (TEXTS[:6], TEXTS[6:9]))
    demo = SimpleNamespace(train=train, test=test, licence="PSF-2.0", held_out_modules=("json", "queue"))
    monkeypatch.setattr("liger_trainer.extras.demo.demo_dataset", lambda name: demo)
    facts = load("demo:python_docstrings", None, "max_eval_rows=2").facts
    assert (facts.train_rows, facts.test_rows, facts.licence) == (6, 2, "PSF-2.0")
    assert facts.held_out == "the first 2 of 3 rows: 2 whole modules: json, queue"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"text": "a"}\n{"text": "b\n{"text"\n',
         "rows.jsonl:2: not valid JSON: .*:3: not valid JSON: .*Wrong rows: 2"),
        ('{"text": "a"}\n\n{"text": 3}\n', "rows.jsonl:3: column 'text': expected text, got an integer"),
        ('{"text": "a"}\n{"text": ["b", "c"]}\n', "rows.jsonl:2: column 'text': expected text, got a list"),
        ('{"text": "a", "n": 9223372036854775808}\n' * 2, "rows.jsonl:1: expected numbers of 64 bits"),
        (
            f'{{"prompt": "a", "completion": "b"}}\n{json.dumps({"messages": [{"role": "user", "content": "a"}]})}\n',
            "rows.jsonl:2: a row of the form 'messages', in a file that is read as 'prompt-completion'",
        ),
        ('{"text": "a"}\n{"txt": "b"}\n', "rows.jsonl:2: column 'text': expected text, got null"),
        ('{"text": "a"}\n[1]\n', "rows.jsonl:2: expected a JSON object, got a list"),
        ('{"words": "a", "n": 1}\n', "no usable column. Expected messages.*the rows have: words, n"),
        ('{"messages": [{"role": "user"}]}\n' * 2, "column 'messages': .*got a message whose content is null"),
        ('{"messages": []}\n' * 2, "column 'messages': .*got an empty list"),
        ('{"prompt": "a", "completion": [{"role": "user"}]}\n' * 2, "column 'completion': .*got a list"),
        ('{"input_ids": []}\n' * 2, "column 'input_ids': expected a list of integers, got an empty list"),
        ('{"text": "a", "image": "b"}\n' * 2, "rows.jsonl:1: an image is not there, got b"),
        ('{"text": "a"}\n', "one row cannot be both trained on and held out"),
        ("\n\n", "split 'train' has no rows"),
        (
            lines([{"prompt": "a", "completion": "b"}, {"prompt": CHAT[:1], "completion": CHAT[1:]}]),
            "rows.jsonl:2: column 'prompt': expected text, as in the first row",
        ),
        (
            lines([{"Instruction": "a", "Input": "", "Output": "b"}] * 2),
            "Rename 'Instruction' to 'instruction'. Rename 'Input' to 'input'. Rename 'Output' to 'output'",
        ),
        ("", "the file is empty"),
        ('{"Text": "a"}\n' * 2, "the rows have: Text. Rename 'Text' to 'text'."),
        ('{"prompt": "a", "response": "b"}\n' * 2, "the rows have: prompt, response. Rename .response. to "),
        ('{"question": "a", "answer": "b"}\n', "Rename 'question' to 'prompt'. Rename 'answer' to 'completion'."),
        ('{"text": "a\tb"}\n' * 2, "Invalid control character at character"),
    ],
)  # fmt: skip
def test_wrong_rows(load, text, complaint):
    with pytest.raises(DataError, match=f"(?s){complaint}"):
        load("rows.jsonl", {"rows.jsonl": text})


def test_json_objects_over_several_lines_are_rows(load):
    """Also where it wraps its rows, as SQuAD's files do."""
    pretty = json.dumps({"messages": [{"role": "user", "content": "a"}]}, indent=2)
    files = {"rows/a.json": pretty, "rows/b.json": f"{pretty}\n{pretty}\n\n{pretty}{pretty}"}  # as jq prints rows
    data = load("rows", files)
    assert data.facts.train_rows + data.facts.test_rows == 5
    for indent in (None, 2):
        text = json.dumps({"version": "1", "data": [{"text": "a"}, {"text": "b"}]}, indent=indent)
        assert load("wrapped.json", {"wrapped.json": text}).facts.train_rows == 1
    with pytest.raises(DataError, match="rows.jsonl:1: not valid JSON: .*"):
        load("rows.jsonl", {"rows.jsonl": '{"text": \n{"text": "a"}\n{"text": "b"}\n'})


def test_a_column_that_is_not_read_may_hold_anything(load):
    rows = [{"text": "a", "n": 1}, {"text": "b", "n": "x"}, {"text": "c", "n": {"k": [1, None]}}] * 2
    assert load("rows.jsonl", {"rows.jsonl": lines(rows)}).facts.rows_skipped == 0


IMAGE_PART = [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]


@pytest.mark.parametrize(
    ("row", "overrides", "problem"),
    [
        ({"messages": CHAT[:1]}, ("assistant_only_loss=true",), "only answers are to be learned, but the chat has non"),
        ({"messages": CHAT[:1]}, ("last_turn_only=true",), "only answers are to be learned, but the chat has none"),
        ({"messages": [CHAT[0], {**CHAT[1], "loss": False}]}, ("assistant_only_loss=true",), "marked as not to be"),
        ({"messages": [*IMAGE_PART, *CHAT]}, (), "as parts of text, got a part 'image_url'"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, (), "'weight', .*got 0.5"),
        ({"messages": CHAT, "system": 3}, (), "column 'system': expected text or null"),
        ({"messages": CHAT, "tools": "none"}, (), "column 'tools': expected a list of tools, or JSON text"),
    ],
)
def test_a_wrong_chat_is_one_row_by_its_line(load, row, overrides, problem):
    text = lines([*[{"messages": CHAT}] * 5, row])
    with pytest.raises(DataError, match=f"rows.jsonl:6: .*{problem}"):
        load("rows.jsonl", {"rows.jsonl": text}, *overrides)
    assert load("rows.jsonl", {"rows.jsonl": text}, *overrides, "bad_rows=skip").facts.rows_skipped == 1


@pytest.mark.parametrize(("more", "trainer"), [({"label": False}, "KTO"), ({"rejected_response": "x"}, "DPO")])
def test_rows_for_preferences_name_their_trainer(load, more, trainer):
    with pytest.raises(DataError, match=f"{trainer}Trainer takes them .docs/preference.md"):
        load("rows.jsonl", {"rows.jsonl": lines([{"messages": CHAT, **more}] * 2)})


def test_labels_of_0_and_1_are_verdicts_and_other_numbers_are_not(load):
    for labels, refused in (((1, 0), True), ((0, 1, 2), False), ((1, 1), False), (("1", "x"), False)):
        files = {"rows.jsonl": lines([{"prompt": "a ", "completion": "b", "label": label} for label in labels])}
        with pytest.raises(DataError, match="KTOTrainer") if refused else nullcontext():
            load("rows.jsonl", files)


def test_a_wrong_row_that_is_held_out_is_named_by_its_line(load):
    rows = [{"messages": CHAT}] * 9 + [{"messages": [{"role": "user", "content": None}]}]
    for seed in range(8):  # wherever the split puts it
        with pytest.raises(DataError, match="rows.jsonl:10: column 'messages'"):
            load("rows.jsonl", {"rows.jsonl": lines(rows)}, "holdout_fraction=0.4", f"seed={seed}")


@pytest.mark.parametrize(
    ("name", "overrides", "complaint"),
    [
        ("missing.jsonl", [], "command line: dataset_name: no such file or directory: missing.jsonl"),
        ("./missing", [], "no such file or directory"),
        ("d/*.jsonl", [], r"no such file or directory: d/.*: no file has a name like that"),
        ("https://x.org/rows.jsonl", [], "no such file or directory: https.*. Download it first"),
        ("no/such-dataset", [], "there is no file or directory no/such-dataset, and the hub could not be asked"),
        ("demo:nothing", [], "dataset_name: No demo is called"),
        ("rows.jsonl", ["dataset_config=x"], "dataset_config: has no effect"),
        ("rows.jsonl", ["dataset_train_split=x"], "dataset_train_split: no split 'x'; the dataset has 'train'"),
        ("rows.jsonl", ["dataset_test_split=x"], "dataset_test_split: no split 'x'"),
        (
            "rows.jsonl",
            ["dataset_kwargs={skip_prepare_dataset: true}"],
            "dataset_kwargs: skip_prepare_dataset needs rows",
        ),
        ("rows.jsonl", ["completion_only_loss=true"], "completion_only_loss: needs prompt and completion"),
        ("rows.jsonl", ["assistant_only_loss=true"], "assistant_only_loss: needs rows of chat messages"),
        ("rows.xml", [], "expected a file ending in .json, .jsonl"),
    ],
)
def test_names_and_options_that_do_not_fit(load, name, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load(name, {"rows.jsonl": lines(TEXTS), "rows.xml": "<a/>"}, *overrides)


def test_holdout_fraction_beside_a_test_split(load):
    files = {"d/train.jsonl": lines(TEXTS), "d/test.jsonl": lines(TEXTS)}
    assert load("d", files).facts.test_rows_seen_in_training == 20
    with pytest.raises(ConfigError, match="holdout_fraction: has no effect: the dataset has a split 'test'"):
        load("d", None, "holdout_fraction=0.1")


def test_prompts_alone_are_rows_where_their_completions_are_sampled(load):
    rows = [{"prompt": CHAT[:1], "answer": "b"}] * 3
    teacher = "teacher_model_name_or_path=t"
    data = load("rows.jsonl", {"rows.jsonl": lines(rows)}, teacher, "lmbda=1.0")
    assert data.facts.form == "prompt" and data.train.column_names == ["prompt"]
    assert (
        load("rows.jsonl", {"rows.jsonl": lines([{"prompt": "a"}] * 3)}, teacher, "seq_kd=true").facts.train_rows == 2
    )
    alpaca = {"rows.jsonl": lines([{"instruction": "a", "output": "b"}] * 3)}
    assert load("rows.jsonl", alpaca, teacher, "lmbda=0.5").facts.form == "prompt-completion"
    load("rows.jsonl", {"rows.jsonl": lines(rows)}, teacher, "lmbda=1.0")
    with pytest.raises(ConfigError, match="lmbda: the rows have prompts and no completions; set it to 1.0"):
        load("rows.jsonl", None, teacher, "lmbda=0.5")
    with pytest.raises(DataError, match="no usable column.*the rows have: prompt"):
        load("rows.jsonl", None)
    broken = lines([{"prompt": [{"content": "a"}]}] * 3)
    with pytest.raises(DataError, match=r"rows.jsonl:\d: column 'prompt': expected"):
        load("rows.jsonl", {"rows.jsonl": broken}, teacher, "lmbda=1.0")


def test_only_line_feeds_end_lines(load, tmp_path):
    """Not U+2028, U+0085 and the like, which str.splitlines takes for ends and JSON allows in a string."""
    texts = [f"a{end}b" for end in "\u2028\u2029\u0085"]
    content = "\ufeff" + "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\r\n"
    (tmp_path / "rows.jsonl").write_bytes(content.encode())
    data = load("rows.jsonl")
    assert sorted([*data.train["text"], *data.test["text"]]) == sorted(texts) and data.facts.blank_lines_skipped == 0
    (tmp_path / "rows.txt").write_bytes("\ufeffa\u2028b\r\nc\u0085d\n".encode())
    data = load("rows.txt")
    assert sorted([*data.train["text"], *data.test["text"]]) == ["a\u2028b", "c\u0085d"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"text": "ä"}\n'.encode("latin-1"), "got the byte 0xe4 at character 11: save the file as UTF-8"),
        (
            '{"text": "ä"},\n{"text": "b"}\n'.encode(),
            "rows.jsonl:1: expected one JSON object a line, got a comma after it",
        ),
    ],
)
def test_a_file_that_another_program_wrote_says_what_to_do(load, tmp_path, content, complaint):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(complaint)):
        load("rows.jsonl")


def test_a_thousand_wrong_lines_of_ten_kinds_are_located_or_skipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset_name: rows.jsonl\n")
    places = malformed(tmp_path / "rows.jsonl", rows=2000, each=100)
    with pytest.raises(DataError) as raised:
        load_run_datasets(load_run_config("run.yaml", []), vocabulary=64)
    message = str(raised.value)
    assert message.endswith("Wrong rows: 1,000. Mend them, or leave them out: bad_rows=skip.")
    for kind, (_, complaint) in TEN_KINDS.items():
        assert re.search(complaint, message), kind
    named = located(message)
    assert named == {place for each in places.values() for place in each}
    data = load_run_datasets(load_run_config("run.yaml", ["bad_rows=skip"]), vocabulary=64)
    assert (data.facts.train_rows + data.facts.test_rows, data.facts.rows_skipped) == (1000, 1000)
    assert sum(int(what.partition(" ")[0]) for what in data.facts.rows_skipped_for.values()) == 1000
    assert {tuple(row["input_ids"]) for row in data.train} == {(1, 2, 3)}
    seen = {data.place(split, i) for split in ("train", "test") for i in range(len(getattr(data, split)))}
    assert not seen & {f"rows.jsonl:{place}" for place in named} and "rows.jsonl:11" in seen


def test_answers_that_say_nothing_are_counted(load):
    user = {"role": "user", "content": "a"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chats = [[user, {"role": "assistant", "content": answer}] for answer in ["b", "c", " ", "d", "", "e"] * 3]
    rows = "".join(json.dumps({"messages": chat}) + "\n" for chat in [*chats, [user, call], [user, chats[0][1]]])
    found = load("rows.jsonl", {"rows.jsonl": rows}, "holdout_fraction=0.05").facts.empty_answers
    assert found is not None and re.fullmatch(r"6 rows: \S*rows.jsonl:3, 5, 9, 11, 15, 17", found)
    human = [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]
    shared = "".join(json.dumps({"conversations": human}) + "\n" for _ in range(4))
    assert (load("rows.jsonl", {"rows.jsonl": shared}).facts.empty_answers or "").startswith("4 rows: ")
    assert load("rows.csv", {"rows.csv": "prompt,completion\na,b\nc,d\n"}).facts.empty_answers is None
    blank = {"rows.jsonl": lines([{"prompt": "a", "completion": end} for end in ("b", " ", "c")])}
    assert (load("rows.jsonl", blank).facts.empty_answers or "").endswith("rows.jsonl:2")


def test_columns_of_a_csv_file_that_are_no_columns_say_why(load):
    for header, row, hint in (
        ("prompt, completion", "a,b", "Rename ' completion' to 'completion'."),
        ("Question,Answer", "a,b", "Rename 'Question' to 'prompt'. Rename 'Answer' to 'completion'."),
    ):
        with pytest.raises(DataError, match=re.escape(hint)):
            load("rows.CSV", {"rows.CSV": f"{header}\n{row}\n{row}\n"})


def test_a_row_of_a_csv_file_with_more_cells_than_columns_is_refused(load):
    """pandas would take the prompt for the row's label, and the rest of the text for the completion."""
    quoted = 'prompt,completion\n"two\nlines, a comma",b\nc,"d, e"\n'
    for begins in ("", "\n", " \n\n"):  # the columns are in the first line that says something
        assert {*load("rows.csv", {"rows.csv": begins + quoted}).train["completion"]} < {"b", "d, e"}
    for name, content, complaint in (
        (
            "rows.csv",
            "prompt,completion\na,b, c\nd,e, f\n",
            "rows.csv:2: expected 2 cells, as in the first line, got 3",
        ),
        ("rows.csv", f"{quoted}f,g,h\n", "rows.csv:5: expected 2 cells"),
        ("rows.csv", f"\n{quoted}f,g,h\n", "rows.csv:6: expected 2 cells"),
        ("rows.csv", "text\none, two\n", "Put texts with ',' in double quotes."),
        ("rows.tsv", "prompt\tcompletion\na\tb\tc\n", r"Put texts with '\t' in double quotes."),
        ("rows.csv", "question;answer\na;b;c\n", "expected 2 cells, as in the first line, got 3"),
    ):
        with pytest.raises(DataError, match=re.escape(complaint)):
            load(name, {name: content})


def test_wrong_rows_of_other_formats_are_skipped_too(load):
    files = {"rows.csv": "prompt,completion\na,b\nc,\nd,e\nf,g\n" + "h,i\n" * 8}
    with pytest.raises(DataError, match="rows.csv, row 1: column 'completion'"):
        load("rows.csv", files)
    data = load("rows.csv", files, "bad_rows=skip", "holdout_fraction=0.4")
    assert data.facts.rows_skipped == 1 and {*data.train["prompt"], *data.test["prompt"]} == set("adfh")
    with pytest.raises(DataError, match="rows.jsonl:1: not valid JSON"):  # nothing is left
        load("rows.jsonl", {"rows.jsonl": "{\n{\n"}, "bad_rows=skip")


@pytest.mark.parametrize(
    "command",
    ["preview run.yaml", "eval run.yaml", "cache capture run.yaml teacher_cache_dir=cached",
     "init-student run.yaml student_num_layers=1"],
)  # fmt: skip
def test_commands_locate_ids_beyond_the_vocabulary(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text(lines([{"input_ids": [1, 2, 3]}] * 11 + [{"input_ids": [1, 2, 64]}]))
    models = {"model_name_or_path": "model", "teacher_model_name_or_path": "model"}
    (tmp_path / "run.yaml").write_text(settings(recipe="distill", **models))
    code, _, err = call(capsys, *command.split())
    where = "rows.jsonl:12: column 'input_ids': expected ids from 0 to 63 (the model's), got 64."
    assert code == 4 and where in " ".join(err.split())
