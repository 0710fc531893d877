"""What each command refuses: its exit code, the words of its one message, and that it writes nothing.

What `run` refuses has tests/run/test_recipes.py, what `merge` and `resume` refuse test_run.py.
"""

import io
import json
import shlex
import shutil
from importlib.util import find_spec

import pytest
from commands import call, refused, save_models, settings, texts, write_rows
from finished_runs import content

from liger_trainer.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, rows and a configuration; runs without weights, and with weights that are cut off."""
    folder = tmp_path_factory.mktemp("refusals")
    save_models(folder, "student")
    write_rows(folder / "rows.jsonl", [{"prompt": row["text"], "completion": " w1 w2"} for row in texts(20)])
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    write_rows(folder / "chats.jsonl", [{"messages": chat}] * 20)
    (folder / "plain.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    for place in ("run.yaml", "empty/config.yaml", "cut/config.yaml"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(settings(bf16=False))
    (folder / "sub").mkdir()
    (folder / "sub" / "run.yaml").write_text("model_name_or_path: student\ndataset_name: beside.jsonl\n")
    (folder / "sub" / "beside.jsonl").touch()
    (folder / "cut" / "model.safetensors").write_bytes(b"cut off")
    shutil.copy(folder / "student" / "config.json", folder / "cut")
    (folder / "list.json").write_text("[]")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "listed").mkdir()
    (folder / "listed" / "adapter_config.json").write_text('{"base_model_name_or_path": ["student"]}')
    (folder / "listed" / "adapter_model.safetensors").write_bytes(b"")
    (folder / "finished").mkdir()
    (folder / "finished" / "metrics.json").write_text(json.dumps(content()))
    (folder / "mine.html").write_text("mine")
    (folder / "none.jsonl").touch()
    return folder


CHATS = "run run.yaml dataset_name=chats.jsonl chat_template_path=plain.jinja"
DISTILL = "estimate run.yaml recipe=distill teacher_model_name_or_path=student"
REFUSED = [
    ("run", 2, "Missing argument"),
    ("run nothing.yaml", 2, "neither a file nor a built-in configuration"),
    ("run smollm2/sft_full max_steps", 2, "expected key=value, --key value or ~key, got 'max_steps'"),
    ("run smollm2/sft_full --max_stepz 3", 2, "max_stepz: unknown key. Did you mean max_steps?"),
    *((f"{command} anything", 2, instead) for command, instead in app.REMOVED.items()),
    *(
        (f"{command}~nobody-here/x", 2, "no user of this name has a home")
        for command in ("report ", "preview run.yaml dataset_name=", "run run.yaml output_dir=")
    ),
    ("ls distil", 2, "Did you mean distill?"),
    ("doctor", 2, "takes a model or --all"),
    ("doctor lama", 2, "Did you mean llama"),
    ("selfcheck --dtype int8", 2, "expected float32, bfloat16, float16, got int8"),
    ("selfcheck --device nonsense", 2, "nonsense"),
    pytest.param("run run.yaml load_in_4bit=true use_peft=true", 2,
     "command line: load_in_4bit: true needs bitsandbytes, which is not installed",
     marks=pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")),
    ("run run.yaml attn_implementation=flash_attention_2", 2,
     "command line: attn_implementation: flash_attention_2 needs"),
    ("run run.yaml attn_implementation=flex_attention", 2,
     "command line: attn_implementation: torch's flex_attention does not train on a CPU; leave"),
    ("run run.yaml attn_implementation=foo", 2, "command line: attn_implementation: expected one of eager, "),
    ("validate run.yaml attn_implementation=sdpaa model_name_or_path=not/here", 2, "got 'sdpaa'. Did you mean sdpa?"),
    ("merge listed merged", 2, "does not name its base model"),
    ("chat listed", 2, "does not name its base model"),
    ("validate run.yaml model_name_or_path=adapter", 2, "merge it first: liger-trainer merge adapter MERGED"),
    ("validate run.yaml fp16=true", 2, "command line: fp16: a CPU does not train in fp16"),
    ("validate run.yaml use_peft=true lora_modules_to_save=[lm_haed]", 2, "'lm_haed'. Did you mean lm_head?"),
    ("validate run.yaml use_peft=true lora_target_modules=[q_proj,k_porj]", 2,
     "command line: lora_target_modules: student has no module called 'k_porj'. Did you mean k_proj?"),
    ("run run.yaml bf16=true use_cpu=false", 2, "command line: bf16: no GPU here computes in bf16: leave bf16 out"),
    ("run run.yaml use_peft=true lora_target_modules=[q_proj,k_porj]", 2,
     "command line: lora_target_modules: student has no module called 'k_porj'. Did you mean k_proj?"),
    ("run run.yaml use_peft=true lora_target_modules=all-liner", 2,
     "command line: lora_target_modules: student has no module called 'all-liner'. Did you mean all-linear?"),
    ("preview run.yaml use_peft=true lora_target_modules=w", 2, "student has no module called 'w'. It has"),
    (f"{CHATS} assistant_only_loss=true", 2, "command line: assistant_only_loss: this model's chat template does"),
    ("chat nowhere", 2, "nowhere cannot be loaded: there is no such folder in"),
    ("cache capture run.yaml teacher_cache_dir=c", 2,
     "teacher_model_name_or_path: missing; a capture needs the teacher itself."),
    ("merge student merged", 2, "student holds no adapter (adapter_config.json). It is a whole model already."),
    ("chat .", 2, ". holds no model. Expected a model, a finished run or one of its checkpoints."),
    ("merge nowhere merged", 2, "nowhere: no such directory; expected a run, a checkpoint or an adapter."),
    ("resume nowhere", 2, "nowhere: no such directory; expected the output_dir of a run."),
    ("preview run.yaml max_length=2", 4, "No row of the train dataset has a supervised token"),
    ("preview run.yaml dataset_name=missing.jsonl", 2, "no such file or directory"),
    ("validate sub/run.yaml", 2, "beside.jsonl. There is sub/beside.jsonl, but names are looked for from the folder"),
    ("preview run.yaml --rows 0", 2, "--rows"),
    ("eval student", 2, "holds no config.yaml"),
    ("eval nowhere", 2, "neither a file nor a built-in configuration"),
    ("eval empty", 2, "holds no weights"),
    ("eval cut", 6, "cannot be read"),
    ("eval max_length=3 run.yaml", 2, "before settings"),
    ("estimate run.yaml optim=grokadamw", 2, "optim"),
    ("estimate run.yaml torch_compile=true", 2, "torch_compile"),
    ("estimate run.yaml --gpu Foo", 2, "no GPU is called"),
    ("estimate run.yaml --gpu a100", 2, "A100 80GB, A100 40GB: say which"),
    ("estimate run.yaml --gpu 'H1000 80GB'", 2, "Did you mean H100 80GB?"),
    ("estimate run.yaml --gpu 'RTX 3090 Ti'", 2, "Did you mean RTX 3090 24GB?"),
    ("estimate run.yaml --gpu 'GTX 1080'", 2, "There are B200"),
    ("estimate run.yaml --gpu 0GB", 2, "expected a size above 0, got '0GB'"),
    ("validate .", 2, "expected a file or a built-in configuration, got a folder"),
    ("validate nofile.yaml", 2, "built-in configuration. `liger-trainer ls` lists"),
    ("validate rn.yaml", 2, "Did you mean run.yaml?"),
    ("validate run.yaml optim=adamv", 2, "Did you mean adamw_torch or adamw_torch_fused or adamw_torch_xla?"),
    ("validate run.yaml recipe=distill teacher=self use_peft=true losses=forwrd_kl", 2,
     "losses: expected a list such as [{type: forward_kl}], got 'forwrd_kl'. Did you mean forward_kl?"),
    (f"{DISTILL} teacher_device=cpu", 2, "teacher_device"),
    (f"{DISTILL} teacher_offload=true", 2, "teacher_offload"),
    ("estimate run.yaml recipe=distill 'teachers=[{name: a, teacher_model_name_or_path: student}]'", 2, "teachers"),
    ("estimate run.yaml deepspeed=rows.jsonl", 2, "rows.jsonl cannot be read"),
    ("estimate run.yaml deepspeed=list.json", 2, "list.json: expected keys with values, got a list"),
    ("estimate run.yaml accelerate_config=list.json", 2, "list.json: expected keys with values, got a list"),
    ("report", 2, "Missing argument"),
    ("report nowhere", 2, "no such directory"),
    ("report student", 2, "neither metrics.json, which a finished run has, nor a checkpoint with trainer_state.json"),
    ("report finished finished/.", 2, "is given twice"),
    ("report finished --output finished/metrics.json", 2, "expected a name that ends in .html"),
    ("report finished --output mine.html", 2, "mine.html exists, and is no report"),
    ("report finished --output run.yaml/a.html", 2, "cannot be written"),
    ("new", 2, "--purpose is missing, and there is no terminal to ask on."),
    ("new --purpose sft --model a", 2, "--method is missing"),
    ("new --purpose sft --model a --teacher b", 2, "--teacher: only --purpose distill has a teacher."),
    ("new --purpose distill --model a", 2, "--teacher is missing"),
    ("new --purpose sft --model student --method full --data none.jsonl", 2, "--data: none.jsonl has no rows."),
    ("new run.yaml --purpose sft", 2, "run.yaml exists; choose another name or add --force."),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "message"), REFUSED)
def test_a_refusal_is_one_message_with_its_exit_code(folder, monkeypatch, capsys, words, code, message):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    refused(call(capsys, *shlex.split(words)), code, message)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_attention_of_our_own_is_not_offered(folder, monkeypatch, capsys):
    from transformers import AttentionInterface

    from liger_trainer.patching.packing import packed_attention

    assert packed_attention.OF_SLICES in AttentionInterface().valid_keys()
    monkeypatch.chdir(folder)
    said = refused(call(capsys, "validate", "run.yaml", "attn_implementation=foo"), 2, "expected one of eager, ")
    assert "liger_" not in said
