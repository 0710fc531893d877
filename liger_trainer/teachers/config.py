"""The fields of LigerDistillConfig about teachers: kind, number, place, cache and server.

This module checks what needs no model and no server; the teachers' classes check the rest. It imports no torch.
"""

import json
import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..losses.spec import Distillation

KINDS = ("model", "cache", "self", "server")
PROTOCOLS = ("vllm", "echo")
DTYPES = ("bfloat16", "float16", "float32", "auto")
SPARSE = {"cache": "A teacher cache", "server": "A teacher's server"}
PLACEMENT = ("teacher_dtype", "teacher_load_in_4bit", "teacher_load_in_8bit", "teacher_device", "teacher_offload")
SERVER = tuple(
    f"teacher_server_{name}"
    for name in ("base_url", "model", "protocol", "top_k", "api_key_env", "timeout", "retries", "concurrency")
)
# {field: the only kind of teacher that reads it}. Not teacher_cache_dir: a capture of any teacher writes there.
OF_ONE_KIND = {**dict.fromkeys(SERVER, "server"), "verify_teacher_cache": "cache"}
FILES = (
    "teacher_model_name_or_path",
    "teacher_model_revision",
    "teacher_model_init_kwargs",
    "teacher_tokenizer_name_or_path",
)
OF_LOADING = ("teacher_model_revision", "teacher_model_init_kwargs")
OF_ONE_TEACHER = (*FILES, *PLACEMENT)
ENTRY_KEYS = ("name", "teacher", "weight", "routes", *OF_ONE_TEACHER)


def _option(default: Any, help: str, **limits: float) -> Any:
    return field(default=default, metadata={"help": help, "limits": limits})


def _choice(default: Any, help: str, *choices: Any) -> Any:
    return field(default=default, metadata={"help": help, "choices": list(choices)})


@dataclass
class TeacherConfig:
    """Teachers of `LigerDistillTrainer`; docs/teachers.md.

    Args:
        teacher: "model", in this process; "cache", what `liger-trainer cache` wrote down of one (docs/cache.md);
            "self", the student without its adapters; "server", one that answers `/v1/completions`.
        teachers: several teachers: a list of dictionaries with `name`, and `teacher_model_name_or_path` (unless the
            trainer is given a model of that name) or `teacher: self`. Each may have `weight` (default 1), `routes`, and
            fields of its own: `teacher_model_revision`, `teacher_model_init_kwargs`, `teacher_tokenizer_name_or_path`,
            and those about placement.
        teacher_column: the column that names the teacher of each row. Without it every teacher teaches every row, and
            the divergences are added up, each times its weight.
        teacher_tokenizer_name_or_path: where the teacher's tokenizer is, if not beside the teacher.
        teacher_dtype: dtype of the teacher's weights. Default: that of the run.
        teacher_load_in_4bit, teacher_load_in_8bit: quantise its weights with bitsandbytes.
        teacher_device: where it lives, such as "cuda:1" or "cpu". Default: with the student.
        teacher_offload: keep its weights in CPU memory and bring them to the device layer by layer.
        teacher_server_base_url: such as "http://localhost:8000/v1".
        teacher_server_model: the model's name there.
        teacher_server_protocol: "vllm", with `prompt_logprobs`, or "echo", with `echo` and `logprobs`.
        teacher_server_top_k: likeliest tokens asked for at each position.
        teacher_server_api_key_env: the environment variable that holds the key.
        teacher_server_timeout: seconds that one request may take to connect, or without a byte of the answer.
        teacher_server_retries: further attempts after one that failed for a reason that may pass.
        teacher_server_concurrency: requests under way at a time.
        teacher_cache_dir: the directory of that cache. `liger-trainer cache` writes it.
        verify_teacher_cache: read the whole cache and compare its checksums before training.
        cache_kind, cache_entries, cache_tail_draws, cache_bits, cache_shard_mb: what is captured: "topk", the likeliest
            tokens and the mass of the rest, or "sampled", tokens drawn from the teacher; how many (default 64
            likeliest, 12 drawn); of "topk", how many are drawn from the rest (default 32); bits of a log-probability,
            8 or 16; MiB of a shard. Training reads them out of the cache.
        teacher_model_name_or_path: the teacher, when it is not given to the trainer: a model directory or hub id. With
            a cache: the one it must have been captured from, if named.
        teacher_model_revision: its branch, tag or commit.
        teacher_model_init_kwargs: keywords for its `from_pretrained`. dtype defaults to that of the run: bfloat16
            with `bf16`, float16 with `fp16`, else float32.
    """

    teacher: str = _choice(
        "model", "model: in this process; cache: teacher_cache_dir; self: adapters off; server: over HTTP.", *KINDS
    )
    teachers: list[dict[str, Any]] | str | None = _option(
        None, "Several teachers, e.g. [{name: math, teacher_model_name_or_path: ..., weight: 0.7}, ...]."
    )
    teacher_column: str | None = _option(None, "Column of the rows that names the one of `teachers` that teaches them.")
    teacher_tokenizer_name_or_path: str | None = _option(
        None, "The teacher's tokenizer, if it is not in the teacher's own directory."
    )
    teacher_dtype: str | None = _choice(None, "dtype of the teacher's weights; default: that of the run.", *DTYPES)
    teacher_load_in_4bit: bool = _option(False, "Quantise the teacher's weights to 4 bits (bitsandbytes).")
    teacher_load_in_8bit: bool = _option(False, "Quantise the teacher's weights to 8 bits (bitsandbytes).")
    teacher_device: str | None = _option(None, "Device of the teacher, such as cuda:1 or cpu; default: the student's.")
    teacher_offload: bool = _option(False, "Keep the teacher's weights in CPU memory, streamed layer by layer.")
    teacher_server_base_url: str | None = _option(None, "The teacher's server, such as http://localhost:8000/v1.")
    teacher_server_model: str | None = _option(None, "Name of the teacher's model on its server.")
    teacher_server_protocol: str = _choice("vllm", "vllm: prompt_logprobs; echo: echo and logprobs.", *PROTOCOLS)
    teacher_server_top_k: int = _option(64, "Likeliest tokens that the server is asked for.", ge=1, le=1024)
    teacher_server_api_key_env: str | None = _option(None, "Environment variable that holds the server's API key.")
    teacher_server_timeout: float = _option(60.0, "Seconds that the server may be silent.", gt=0)
    teacher_server_retries: int = _option(5, "Further attempts where a request failed for a passing reason.", ge=0)
    teacher_server_concurrency: int = _option(16, "Requests to the server at a time.", ge=1, le=256)

    teacher_cache_dir: str | None = _option(None, "Directory of the teacher cache that `liger-trainer cache` writes.")
    verify_teacher_cache: bool = _option(False, "Compare the checksums of the whole cache before training.")
    cache_kind: str = _choice(
        "topk", "Captured: the likeliest tokens and the rest's mass, or draws.", "topk", "sampled"
    )
    cache_entries: int | None = _option(None, "Tokens captured a position: 64 likeliest, or 12 draws.", ge=1, le=1024)
    cache_tail_draws: int | None = _option(
        None, "Of topk: tokens drawn from the rest, default 32; 0: its mass alone.", ge=0, le=1023
    )
    cache_bits: int = _choice(8, "Bits of a captured log-probability.", 8, 16)
    cache_shard_mb: int = _option(64, "MiB of a shard of the cache.", ge=1)
    teacher_model_name_or_path: str | None = _option(None, "The teacher: a model directory or hub id.")
    teacher_model_revision: str | None = _option(None, "Branch, tag or commit of the teacher.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = _option(
        None, "Keywords for the teacher's `from_pretrained`, such as dtype."
    )

    if TYPE_CHECKING:  # the fields of SFTConfig, which stands beside this class in LigerDistillConfig

        def __getattr__(self, name: str) -> Any: ...

    def check_teacher(self, distillation: "Distillation") -> None:
        """Raise ValueError for what does not go together."""
        if isinstance(self.teachers, str):
            self.teachers = json.loads(self.teachers)
        _one_of(self, "teacher", KINDS)
        _one_of(self, "teacher_server_protocol", PROTOCOLS)
        if self.teachers is not None:
            self._check_teachers()
        check_placement(self)
        self._keep_to_one_gpu()
        in_vain = placed(self) or next((name for name in OF_LOADING if getattr(self, name, None)), None)
        if self.teacher in ("self", "server") and in_vain:
            raise ValueError(f"{in_vain} has no effect with teacher={self.teacher!r}: it loads no weights.")
        if self.teacher == "self" and self.teacher_tokenizer_name_or_path is not None:
            raise ValueError("teacher_tokenizer_name_or_path has no effect with teacher='self': it is the student's.")
        defaults = {item.name: item.default for item in fields(self)}
        for name, kind in OF_ONE_KIND.items():
            if self.teacher != kind and getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} has no effect without teacher={kind!r}.")
        if self.teacher == "server":
            self._check_server(distillation)
        if self.teacher in SPARSE:
            self._check_sparse(SPARSE[self.teacher], distillation)

    def _keep_to_one_gpu(self) -> None:
        """Keep the student off the teacher's GPU: transformers would spread one process over all GPUs it sees."""
        entries = entries_of(self) if self.teachers else []
        devices = [self.teacher_device, *(entry.args.teacher_device for entry in entries)]
        if any(str(device).startswith("cuda") for device in devices) and getattr(self, "n_gpu", 1) > 1:
            self._n_gpu = 1

    def _check_teachers(self) -> None:
        if self.teacher != "model":
            raise ValueError(f"teachers are models: leave teacher={self.teacher!r} out.")
        if getattr(self, "teacher_model_name_or_path", None) is not None:
            raise ValueError("Give either teachers or teacher_model_name_or_path, not both.")
        entries_of(self)

    def _check_server(self, distillation: "Distillation") -> None:
        for name in ("teacher_server_base_url", "teacher_server_model"):
            if not getattr(self, name):
                raise ValueError(f"teacher='server' needs {name}.")
        url = str(self.teacher_server_base_url)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"teacher_server_base_url must begin with http:// or https://, got {url!r}.")
        for name, least in (("retries", 0), ("concurrency", 1), ("top_k", 1)):
            if getattr(self, f"teacher_server_{name}") < least:
                raise ValueError(f"teacher_server_{name} must be at least {least}.")
        if self.teacher_server_top_k > 1024 or not self.teacher_server_timeout > 0:
            raise ValueError("teacher_server_top_k must be at most 1024, and teacher_server_timeout above 0.")
        if distillation.temperature != 1.0:
            raise ValueError(
                f"A server's log-probabilities are of temperature 1, the loss is of {distillation.temperature}: what "
                "the tokens beyond its list have at another temperature cannot be known. Use temperature 1, or a "
                "teacher in this process or in a cache."
            )

    def _check_sparse(self, who: str, distillation: "Distillation") -> None:
        used = {kind for kind, weight in distillation.weights.items() if weight}
        if used != {"forward_kl"}:
            raise ValueError(
                f"{who} determines the forward KL alone, with or without ce beside it; the loss asks for "
                f"{', '.join(sorted(used)) or 'no divergence'}. Use beta=0, or losses with forward_kl and ce."
            )
        if getattr(self, "label_smoothing_factor", 0.0):
            raise ValueError(
                f"label_smoothing_factor is not part of the loss against {who[0].lower()}{who[1:]}: leave it at 0."
            )


@dataclass(frozen=True)
class TeacherEntry:
    """One of `teachers`. `args` is the configuration in which the entry's own fields replace the common ones."""

    name: str
    weight: float
    routes: tuple[str, ...]  # the values of teacher_column whose rows it teaches
    args: Any


def entries_of(args: Any, names: Mapping[str, Any] | None = None) -> list[TeacherEntry]:
    """Return the `teachers` of a configuration; where it has none, one for each of `names`, teachers given in Python.

    Raises:
        ValueError: an entry has an unknown key, lacks one, or claims a name or route of another.
    """
    listed = args.teachers if args.teachers is not None else [{"name": name} for name in names or ()]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"teachers must be a list such as [{{name: math, weight: 0.7, ...}}], got {listed!r}.")
    entries = [_entry(args, entry) for entry in listed]
    claimed: dict[str, str] = {}
    for entry in entries:
        for value in (entry.name, *(entry.routes if args.teacher_column else ())):
            if claimed.setdefault(value, entry.name) != entry.name or [e.name for e in entries].count(entry.name) > 1:
                raise ValueError(f"teachers: {value!r} belongs to two of them; each name and route may come once.")
    return entries


def _entry(args: Any, entry: Any) -> TeacherEntry:
    if not isinstance(entry, dict) or set(entry) - set(ENTRY_KEYS):
        raise ValueError(f"Each of teachers is a dictionary with keys out of {', '.join(ENTRY_KEYS)}; got {entry!r}.")
    name, weight, routes = entry.get("name"), entry.get("weight", 1.0), entry.get("routes")
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"Each of teachers needs a name, text without a slash; got {name!r}.")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ValueError(f"teachers: the weight of {name} must be a number above 0, got {weight!r}.")
    if routes is not None and not args.teacher_column:
        raise ValueError(f"teachers: the routes of {name} have no effect without teacher_column.")
    if routes is not None and (not isinstance(routes, list) or not routes):
        raise ValueError(f"teachers: the routes of {name} must be a list of the column's values, got {routes!r}.")
    kind = entry.get("teacher", "model")
    if kind not in ("model", "self"):
        raise ValueError(f"teachers: {name} must be of kind model or self, got {kind!r}.")
    if kind == "self" and set(entry) & set(OF_ONE_TEACHER):
        raise ValueError(
            f"teachers: {name} is the student: leave {', '.join(sorted(set(entry) & set(OF_ONE_TEACHER)))} out."
        )
    entry_args = copy(args)
    entry_args.teachers = entry_args.teacher_column = None
    entry_args.teacher = kind
    for key in OF_ONE_TEACHER:
        if key in entry:
            setattr(entry_args, key, entry[key])
    check_placement(entry_args)
    return TeacherEntry(name, float(weight), tuple(str(value) for value in routes or [name]), entry_args)


def teacher_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for what is wrong with the teachers of a configuration, beyond types."""
    args = SimpleNamespace(**values)
    for key, check in (("teachers", _check_loaded), ("teacher_load_in_4bit", check_placement)):
        try:
            check(args)
        except ValueError as error:
            yield next((name for name in PLACEMENT if key != "teachers" and getattr(args, name)), key), str(error)


def is_its_own_teacher(values: Mapping[str, Any]) -> bool:
    """Return whether the student teaches, alone or among several; False where `teachers` is wrong."""
    args = SimpleNamespace(**values)
    if getattr(args, "teachers", None) is None:
        return getattr(args, "teacher", None) == "self"
    try:
        _check_loaded(args)
    except ValueError:
        return False
    return any(entry.args.teacher == "self" for entry in entries_of(args))


def _check_loaded(args: Any) -> None:
    """Check `teachers` of a YAML configuration, where no model can be passed in Python."""
    if args.teachers is None:
        return
    args.teachers = json.loads(args.teachers) if isinstance(args.teachers, str) else args.teachers
    for entry in entries_of(args):
        if entry.args.teacher == "model" and entry.args.teacher_model_name_or_path is None:
            raise ValueError(f"teachers: {entry.name} needs teacher_model_name_or_path.")


def placed(args: Any) -> str | None:
    """Return the first of the fields about placement that is set."""
    return next((name for name in PLACEMENT if getattr(args, name)), None)


def check_placement(args: Any) -> None:
    """Raise ValueError for placements that exclude each other."""
    kwargs = getattr(args, "teacher_model_init_kwargs", None)
    kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs or {}
    quantised = next((n for n in ("teacher_load_in_4bit", "teacher_load_in_8bit") if getattr(args, n)), None)
    if args.teacher_dtype is not None:
        _one_of(args, "teacher_dtype", DTYPES)
    if args.teacher_load_in_4bit and args.teacher_load_in_8bit:
        raise ValueError("Give either teacher_load_in_4bit or teacher_load_in_8bit, not both.")
    for name, theirs in (("teacher_dtype", "dtype"), (quantised, "quantization_config")):
        if name and getattr(args, name) and theirs in kwargs:
            raise ValueError(f"Give either {name} or {theirs} in teacher_model_init_kwargs, not both.")
    if args.teacher_offload and (quantised or args.teacher_device):
        other = quantised or "teacher_device"
        why = "packed weights cannot be streamed" if quantised else "weights are streamed to the student's device"
        raise ValueError(f"teacher_offload does not go with {other}: {why}.")
    where = next((n for n in (quantised, "teacher_device", "teacher_offload") if n and getattr(args, n)), None)
    if where and "device_map" in kwargs:
        raise ValueError(f"Give either {where} or device_map in teacher_model_init_kwargs, not both.")


def _one_of(args: Any, name: str, choices: tuple[str, ...]) -> None:
    if getattr(args, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(args, name)!r}.")
