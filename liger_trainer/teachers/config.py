"""The fields of LigerDistillConfig about teachers: kind, number, place, cache and server.

This module checks what needs no model and no server; the teachers' classes check the rest. It imports no torch.
"""

import json
import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..common.options import (
    HTTP_SERVERS,
    Condition,
    OptionValues,
    check_values,
    clashes,
    conflicts_of,
    equals,
    given,
    has_entry,
    on,
    option,
)

KINDS = ("model", "cache", "self", "server")
PROTOCOLS = ("vllm", "echo")
DTYPES = ("bfloat16", "float16", "float32", "auto")
PLACEMENT = ("teacher_dtype", "teacher_load_in_4bit", "teacher_load_in_8bit", "teacher_device", "teacher_offload")
FILES = (
    "teacher_model_name_or_path",
    "teacher_model_revision",
    "teacher_model_init_kwargs",
    "teacher_tokenizer_name_or_path",
)
OF_LOADING = ("teacher_model_revision", "teacher_model_init_kwargs")
OF_ONE_TEACHER = (*FILES, *PLACEMENT)
# What an entry of `teachers` may have. All else is of the run, or of the loss, and the same for all of them.
ENTRY_KEYS = ("name", "teacher", "weight", "routes", *OF_ONE_TEACHER)
MAX_ENTRIES = 1024  # of a position in a cache

CACHE, SELF, SERVER = equals("teacher", "cache"), equals("teacher", "self"), equals("teacher", "server")
_HIDDEN_CACHE = equals("cache_kind", "hidden")
SAMPLES = on("lmbda") | on("seq_kd") | has_entry("schedules", "lmbda")
"""Completions are sampled at some time in training; see SamplingConfig."""
_TOO_MANY = Condition(
    ("cache_entries", "cache_tail_draws"),
    lambda o: bool(o["cache_tail_draws"]) and (o["cache_entries"] or 64) + o["cache_tail_draws"] > MAX_ENTRIES,
)


def _of_tokens(key: str) -> tuple[Condition, str]:
    """The conflict of an option about recorded tokens with `cache_kind: hidden`."""
    return given(key) & _HIDDEN_CACHE, "has no effect with `cache_kind: hidden`: hidden states are stored, not tokens."


_NOTHING_LOADED = "has no effect with `teacher: self` or `server`: nothing is loaded."


def _of_loading(
    key: str, default: Any, help: str, *conflicts: tuple[Condition, str], choices: tuple[str, ...] = ()
) -> Any:
    """Declare an option about loading a teacher, which some kinds of teacher are not."""
    in_vain = (on(key) & equals("teacher", "self", "server"), _NOTHING_LOADED)
    return option(default, help, choices=choices, conflicts=(in_vain, *conflicts))


def _beside_keyword(key: str, keyword: str) -> tuple[Condition, str]:
    """The conflict of an option with a keyword of `from_pretrained`."""
    both = on(key) & has_entry("teacher_model_init_kwargs", keyword)
    return both, f"give either {key} or {keyword} in teacher_model_init_kwargs, not both."


def _beside_offload(key: str, why: str) -> tuple[Condition, str]:
    return on("teacher_offload") & on(key), f"does not go with {key}: {why}."


def _prompt_conflicts(key: str) -> list[tuple[Condition, str]]:
    return [
        (
            on(key) & (CACHE | SERVER | on("teachers")),
            "goes with one teacher in this process: `teacher: model` or `teacher: self`.",
        ),
        (on(key) & on("seq_kd"), "has no place in completions that the teacher samples; set seq_kd to false."),
    ]


@dataclass
class TeacherConfig:
    """Teachers of `LigerDistillTrainer`; docs/teachers.md. What the texts of the fields leave open:

    Args:
        teacher: "model"; "cache", what `liger-trainer cache` wrote down of one (docs/cache.md); "self", the student
            without its adapters; "server", one that answers `/v1/completions`.
        teachers: a list of dictionaries with `name`, and `teacher_model_name_or_path` (unless the
            trainer is given a model of that name) or `teacher: self`. Each may have `weight` (default 1), `routes`, and
            its own fields: `teacher_model_revision`, `teacher_model_init_kwargs`, `teacher_tokenizer_name_or_path`,
            and those about placement.
        teacher_model_name_or_path: the teacher, when it is not given to the trainer: a model directory or hub id. With
            a cache: the one it must have been captured from, if named.
        teacher_model_init_kwargs: keywords for its `from_pretrained`. dtype defaults to the run's: bfloat16
            with `bf16`, float16 with `fp16`, else float32.
        cache_kind, cache_entries, cache_tail_draws, cache_bits, cache_shard_mb: what is captured: "topk", the likeliest
            tokens and the mass of the rest, "sampled", tokens drawn from the teacher, or "hidden", its last hidden
            states and its head; how many tokens (default 64 likeliest, 12 drawn); of "topk", how many are drawn from
            the rest (default 32); bits of a log-probability, 8 or 16; MiB of a shard. Training reads all but "hidden"
            out of the cache.
        teacher_column: the column that names the teacher of each row. Without it every teacher teaches every row, and
            the divergences are added up, each times its weight.
        teacher_prompt, teacher_prompt_column: what the teacher reads before each row and the student does not, or the
            column of the rows that has it (docs/extras.md).
        teacher_server_base_url: several servers of one model share the requests, and take over those of one that fails.
        teacher_server_timeout: seconds that one request may take to connect, or without a byte of the answer.
    """

    teacher: str = option(
        "model",
        "model: in this process; cache: teacher_cache_dir; self: adapters off; server: over HTTP.",
        choices=KINDS,
        conflicts=[
            (
                CACHE & SAMPLES,
                "a cache knows only the completions in the rows; leave lmbda and seq_kd out, or take the teacher "
                "itself.",
            )
        ],
    )
    teachers: list[dict[str, Any]] | str | None = option(
        None,
        "Several teachers, e.g. [{name: math, teacher_model_name_or_path: ..., weight: 0.7}, ...].",
        conflicts=[
            (
                on("teachers") & equals("teacher", "cache", "self", "server"),
                "are models; leave `teacher` out. One of them may be `teacher: self`.",
            ),
            (
                on("teachers") & on("teacher_model_name_or_path"),
                "give either teachers or teacher_model_name_or_path, not both.",
            ),
        ],
    )
    teacher_column: str | None = option(None, "Column of the rows that names the one of `teachers` that teaches them.")
    teacher_prompt: str | None = option(
        None,
        "Instructions that the teacher reads and the student does not: a system message, or text before plain rows.",
        conflicts=[
            *_prompt_conflicts("teacher_prompt"),
            (on("teacher_prompt") & on("teacher_prompt_column"), "give either the text or its column, not both."),
        ],
    )
    teacher_prompt_column: str | None = option(
        None, "Column that has the `teacher_prompt` of each row.", conflicts=_prompt_conflicts("teacher_prompt_column")
    )
    teacher_model_name_or_path: str | None = _of_loading(
        "teacher_model_name_or_path", None, "The teacher: a model directory or hub id."
    )
    teacher_model_revision: str | None = _of_loading(
        "teacher_model_revision", None, "Branch, tag or commit of the teacher."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = _of_loading(
        "teacher_model_init_kwargs", None, "Keywords for the teacher's `from_pretrained`, such as dtype."
    )
    teacher_tokenizer_name_or_path: str | None = option(
        None,
        "The teacher's tokenizer, if it is not in the teacher's own directory.",
        conflicts=[
            (on("teacher_tokenizer_name_or_path") & SELF, "has no effect with `teacher: self`: it is the student's.")
        ],
    )
    teacher_dtype: str | None = _of_loading(
        "teacher_dtype",
        None,
        "dtype of the teacher's weights; default: the run's dtype.",
        _beside_keyword("teacher_dtype", "dtype"),
        choices=DTYPES,
    )
    teacher_load_in_4bit: bool = _of_loading(
        "teacher_load_in_4bit",
        False,
        "Quantise the teacher's weights to 4 bits (bitsandbytes).",
        _beside_keyword("teacher_load_in_4bit", "quantization_config"),
        _beside_keyword("teacher_load_in_4bit", "device_map"),
        (
            on("teacher_load_in_4bit") & on("teacher_load_in_8bit"),
            "give either teacher_load_in_4bit or teacher_load_in_8bit, not both.",
        ),
    )
    teacher_load_in_8bit: bool = _of_loading(
        "teacher_load_in_8bit",
        False,
        "Quantise the teacher's weights to 8 bits (bitsandbytes).",
        _beside_keyword("teacher_load_in_8bit", "quantization_config"),
        _beside_keyword("teacher_load_in_8bit", "device_map"),
    )
    teacher_device: str | None = _of_loading(
        "teacher_device",
        None,
        "Device of the teacher, such as cuda:1 or cpu; default: the student's.",
        _beside_keyword("teacher_device", "device_map"),
    )
    teacher_offload: bool = _of_loading(
        "teacher_offload",
        False,
        "Keep the teacher's weights in CPU memory, streamed layer by layer.",
        _beside_keyword("teacher_offload", "device_map"),
        _beside_offload("teacher_load_in_4bit", "packed weights cannot be streamed"),
        _beside_offload("teacher_load_in_8bit", "packed weights cannot be streamed"),
        _beside_offload("teacher_device", "weights are streamed to the student's device"),
    )
    teacher_server_base_url: list[str] | str | None = option(
        None,
        "The teacher's server, such as http://localhost:8000/v1, or a list of several that serve the same model.",
        text=HTTP_SERVERS,
        needs=SERVER,
        needed_by=SERVER,
    )
    teacher_server_model: str | None = option(
        None, "Name of the teacher's model on its server.", needs=SERVER, needed_by=SERVER
    )
    teacher_server_protocol: str = option(
        "vllm", "vllm: prompt_logprobs; echo: echo and logprobs.", choices=PROTOCOLS, needs=SERVER
    )
    teacher_server_top_k: int = option(
        64, "Likeliest tokens that the server is asked for.", ge=1, le=1024, needs=SERVER
    )
    teacher_server_api_key_env: str | None = option(
        None, "Environment variable that holds the server's API key.", needs=SERVER
    )
    teacher_server_timeout: float = option(60.0, "Seconds that the server may be silent.", gt=0, needs=SERVER)
    teacher_server_retries: int = option(
        5, "Further attempts where a request failed for a passing reason.", ge=0, needs=SERVER
    )
    teacher_server_concurrency: int = option(16, "Requests to the server at a time.", ge=1, le=256, needs=SERVER)
    teacher_cache_dir: str | None = option(
        None, "Directory of the teacher cache that `liger-trainer cache` writes.", needed_by=CACHE
    )
    verify_teacher_cache: bool = option(False, "Compare the checksums of the whole cache before training.", needs=CACHE)
    cache_kind: str = option(
        "topk",
        "Captured: the likeliest tokens and the rest's mass, draws, or last hidden states with the teacher's head.",
        choices=["topk", "sampled", "hidden"],
    )
    cache_entries: int | None = option(
        None,
        "Tokens captured a position: 64 likeliest, or 12 draws.",
        ge=1,
        le=MAX_ENTRIES,
        conflicts=[_of_tokens("cache_entries")],
    )
    cache_tail_draws: int | None = option(
        None,
        "Of topk: tokens drawn from the rest, default 32; 0: only its mass.",
        ge=0,
        le=MAX_ENTRIES - 1,
        conflicts=[
            (
                on("cache_tail_draws") & equals("cache_kind", "sampled"),
                "are of `cache_kind: topk`, beyond its likeliest tokens; with `sampled`, cache_entries are drawn.",
            ),
            (
                _TOO_MANY,
                "a cache holds at most 1,024 entries a token, cache_entries and cache_tail_draws together.",
            ),
            _of_tokens("cache_tail_draws"),
        ],
    )
    cache_bits: int = option(
        8, "Bits of a captured log-probability.", choices=[8, 16], conflicts=[_of_tokens("cache_bits")]
    )
    cache_shard_mb: int = option(64, "MiB of a shard of the cache.", ge=1)

    if TYPE_CHECKING:  # the fields of SFTConfig, which stands next to this class in LigerDistillConfig

        def __getattr__(self, name: str) -> Any: ...

    def check_teachers(self) -> None:
        """Raise ValueError for an entry of `teachers` that is wrong."""
        if isinstance(self.teachers, str):
            self.teachers = json.loads(self.teachers)
        entries = [] if self.teachers is None else entries_of(self)
        # Keep the student off the teacher's GPU: transformers would spread one process over all GPUs it sees.
        devices = [self.teacher_device, *(entry.args.teacher_device for entry in entries)]
        if any(str(device).startswith("cuda") for device in devices) and getattr(self, "n_gpu", 1) > 1:
            from ..compat.models import use_one_gpu  # torch, which a check of a configuration does without

            use_one_gpu(self)


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
    # A route that two of them claim would be decided by their order; a name is the route of those without any.
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
    # An entry is checked, loaded and placed as if it were the only teacher.
    entry_args = copy(args)
    entry_args.teachers = entry_args.teacher_column = None
    entry_args.teacher = kind
    for key in OF_ONE_TEACHER:
        if key in entry:
            setattr(entry_args, key, entry[key])
    check_values({"teacher_dtype": entry_args.teacher_dtype}, TeacherConfig)
    for key, message in clashes(OptionValues(vars(entry_args), ()), _PLACEMENT_CONFLICTS):
        raise ValueError(f"{key}: {message}")
    # Values of a column are compared as text: YAML reads `routes: [1, 2]` as numbers, and a CSV's column may be either.
    return TeacherEntry(name, float(weight), tuple(str(value) for value in routes or [name]), entry_args)


def teacher_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the entries of `teachers` beyond types, as key and message."""
    try:
        _check_loaded(SimpleNamespace(**values))
    except ValueError as error:
        yield "teachers", str(error).removeprefix("teachers: ")


def is_its_own_teacher(values: Mapping[str, Any]) -> bool:
    """Return whether the student teaches, as the only one or among several; False where `teachers` is wrong."""
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


# ways of keeping a teacher that exclude each other
_KEPT_BY = {*PLACEMENT, "teacher_model_init_kwargs"}
_PLACEMENT_CONFLICTS = [conflict for conflict in conflicts_of(TeacherConfig) if set(conflict.reads) <= _KEPT_BY]
