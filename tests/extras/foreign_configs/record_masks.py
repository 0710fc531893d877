"""Run torchtune, axolotl, LLaMA-Factory and DistillKit on the cases of `foreign_masks.py`, and write `masks.json`.

    python tests/extras/foreign_configs/record_masks.py [TOOL ...]

Needs the tools: `pip install --no-deps torchtune axolotl llamafactory`, DistillKit from its repository, and what their
modules about data import: torchao==0.9.0, tiktoken, blobfile, omegaconf, colorama, addict, fire, einops, kagglehub.
"""

import importlib.machinery
import importlib.metadata
import json
import os
import sys
import tempfile
import types
from base64 import b64encode
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from foreign_masks import CASES, GOLDEN, Case, marked, mask_tokenizer


def by_torchtune(case: Case, rows: Path) -> list[str]:
    from torchtune import datasets
    from torchtune.models.llama3 import llama3_tokenizer

    ranks = rows.parent / "tokenizer.model"
    ranks.write_text("".join(f"{b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    tokenizer = llama3_tokenizer(str(ranks))
    options = read(case, rows)["dataset"]
    build = getattr(datasets, options.pop("_component_").rpartition(".")[2])
    found = []
    for row in build(tokenizer, **options):
        names = [tokenizer.decode([int(i)], truncate_at_eos=False, skip_special_tokens=False) for i in row["tokens"]]
        found.append(marked(zip(names, (int(label) != -100 for label in row["labels"]), strict=True)))
    return found


def by_axolotl(case: Case, rows: Path) -> list[str]:
    from axolotl.prompt_strategies import load
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter
    from axolotl.utils.dict import DictDefault

    tokenizer, config = mask_tokenizer(), read(case, rows)
    (entry,) = config.pop("datasets")
    settings = DictDefault(
        {"train_on_inputs": False, "sequence_len": 512, "chat_template": "tokenizer_default", **config}
    )
    if entry["type"] == "alpaca":  # as its data.wrappers do, which import much more
        strategy = AlpacaPromptTokenizingStrategy(AlpacaPrompter(None), tokenizer, settings.train_on_inputs, 512)
    else:
        strategy = load(entry["type"], tokenizer, settings, DictDefault(entry))
    found = []
    for row in case.rows:
        if strategy.supports_batched:
            made = strategy.tokenize_prompt({name: [value] for name, value in row.items()})
            made = {name: values[0] for name, values in made.items()}
        else:
            made = strategy.tokenize_prompt(row)
        found.append(named(tokenizer, made["input_ids"], made["labels"]))
    return found


def by_llamafactory(case: Case, rows: Path) -> list[str]:
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")  # imported for rows with sound
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from transformers import Seq2SeqTrainingArguments

    known = {field for field in DataArguments.__dataclass_fields__}
    options = {name: value for name, value in read(case, rows).items() if name in known}
    table = {"rows": {"file_name": rows.name, **(case.about or {})}}
    (rows.parent / "dataset_info.json").write_text(json.dumps(table))
    arguments = DataArguments(**{**options, "dataset_dir": str(rows.parent), "overwrite_cache": True})
    tokenizer = mask_tokenizer()
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    training = Seq2SeqTrainingArguments(output_dir=str(rows.parent / "out"), use_cpu=True)
    model = ModelArguments(model_name_or_path="model")
    made = get_dataset(template, model, arguments, training, stage="sft", tokenizer=tokenizer)["train_dataset"]
    return [named(tokenizer, row["input_ids"], row["labels"]) for row in made]


def by_distillkit(case: Case, rows: Path) -> list[str]:
    from distillkit.configuration import DatasetConfiguration
    from distillkit.main import load_data
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer, folder = mask_tokenizer(), str(rows.parent / "rows")
    Dataset.from_list(case.rows).save_to_disk(folder)
    train, _ = load_data(DatasetConfiguration(train_dataset={"disk_path": folder}, seed=None), tokenizer)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 1)
    trainer = SFTTrainer(  # as its DistillationTrainer, which is one, is given them
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)),
        args=SFTConfig(output_dir=str(rows.parent / "out"), max_length=512, use_cpu=True, bf16=False, report_to=[]),
        train_dataset=train,
        processing_class=tokenizer,
    )
    return [named(tokenizer, row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def read(case: Case, rows: Path) -> dict[str, Any]:
    return yaml.safe_load(case.config.replace("ROWS", str(rows)))


def named(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    names = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return marked(zip(names, (label != -100 for label in labels), strict=True))


TOOLS = {
    "torchtune": by_torchtune,
    "axolotl": by_axolotl,
    "llamafactory": by_llamafactory,
    "distillkit": by_distillkit,
}


def version(tool: str) -> str:
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:  # DistillKit from a copy of its repository
        return "1.0.0, a61c2e7"


def main() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    for tool in sys.argv[1:] or TOOLS:
        found = {}
        for name, case in CASES[tool].items():
            with tempfile.TemporaryDirectory() as folder:
                rows = Path(folder) / "rows.json"
                rows.write_text(json.dumps(case.rows))
                found[name] = TOOLS[tool](case, rows)
        golden[tool] = {"version": version(tool), "rows": found}
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
