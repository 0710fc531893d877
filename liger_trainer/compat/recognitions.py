"""What we recognise in the code of other libraries, and whether the installed releases can still be recognised.

A model that is not recognised is mostly one of another structure, which is no failure. So whoever does not recognise
one asks `check`: it tries the same on a sample, a part of the library that has the structure in all releases which we
support. If the sample fails too, the library has changed, and `missed` says so once. `doctor` checks all of them.
"""

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.utils.generic import is_flash_attention_requested

from . import missed
from .code_objects import (
    NO_SOURCE,
    always_reads_after,
    closed_over,
    code_of,
    constants,
    forward_source,
    global_of,
    globals_read,
    is_same_code,
    local_names,
    name_in_source,
    names_read,
    outer_names,
    reads_rest,
    takes_item_of,
)
from .models import GATE
from .torch_internals import checkpoint_hook


@dataclass(frozen=True)
class Recognition:
    """Something that is recognised in another library's code.

    Attributes:
        what, consequence: see `missed`.
        sample: whether the sample is recognised. An error counts as no.
    """

    what: str
    consequence: str
    sample: Callable[[], bool]


@torch.compiler.disable()  # what is asked in a compiled forward is asked outside of its graph
def check(recognition: Recognition) -> bool:
    """Return whether the sample of a recognition is recognised; if not, say so once."""
    return _tried(recognition)


@functools.cache
def _tried(recognition: Recognition) -> bool:
    try:
        recognised = recognition.sample()
    except Exception:  # what a release has moved or renamed fails in any way
        recognised = False
    if not recognised:
        missed(recognition.what, recognition.consequence)
    return recognised


def check_all() -> None:
    """Check every recognition in libraries that are installed."""
    for recognition in RECOGNITIONS:
        check(recognition)


def _model_class(family: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


# transformers: masks. It describes a mask by functions of positions, nested, which a few functions of its file make.


class MaskStructure(NamedTuple):
    """What a mask function of transformers says: causal, and these.

    Attributes:
        index: (rows, length), the number of each token's document in its row; None: one document a row.
        window: a token sees so many tokens, itself the last of them; None: all before it.
    """

    index: Tensor | None = None
    window: int | None = None


# Functions that one line of source has made share their code. So each factory is called once, for the code of its
# products, and a mask function is known by its code and read by its closure.
_NOTHING = torch.zeros(1, 1, dtype=torch.int64)
_CAUSAL = code_of(masking_utils.causal_mask_function)
_AND = code_of(masking_utils.and_masks())
_WINDOW = code_of(masking_utils.sliding_window_overlay(1))
_PACKED = code_of(masking_utils.packed_sequence_mask_function(_NOTHING))
# Positions that start from 0 in each document, by which transformers (5.23, not yet 5.17) reads the rest of the mask.
_REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = None if _REMAP is None else code_of(_REMAP(masking_utils.causal_mask_function, _NOTHING))
# Other mask functions of transformers, which say something else: no failure. Models have more in their own files.
_OTHER_MASKS = (
    "add_offsets_to_mask_function", "bidirectional_mask_function", "blockwise_overlay", "chunked_overlay",
    "_legacy_chunked_overlay", "or_masks", "padding_mask_function", "sliding_window_bidirectional_overlay",
)  # fmt: skip


def mask_structure(function: Callable[..., Any]) -> MaskStructure | None:
    """Return what a mask function says, None where it says anything besides causal, window and documents."""
    leaves = list(_leaves(function))
    for leaf in leaves:
        _expect_known_mask(leaf)
    codes = [code_of(leaf) for leaf in leaves]
    if not {_CAUSAL, _WINDOW, _PACKED}.issuperset(codes) or _CAUSAL not in codes:
        return None
    windows = [closed_over(leaf)["sliding_window"] for leaf in leaves if code_of(leaf) is _WINDOW]
    packed = [closed_over(leaf)["packed_sequence_mask"] for leaf in leaves if code_of(leaf) is _PACKED]
    if len(packed) > 1:
        return None
    return MaskStructure(packed[0] if packed else None, min(windows, default=None))


def _leaves(function: Any) -> Iterator[Any]:
    """Yield the functions that a mask function is the intersection of."""
    code = code_of(function)
    if code is _AND:
        for part in closed_over(function)["mask_functions"]:
            yield from _leaves(part)
    elif code is not None and code is _REMAPPED:
        yield from _leaves(closed_over(function)["mask_function"])
    else:
        yield function


def _expect_known_mask(function: Any) -> None:
    """Say so where transformers' file of masks has made a function that we have never seen."""
    maker = name_in_source(function).partition(".")[0]
    theirs = getattr(function, "__module__", None) == masking_utils.__name__
    if theirs and code_of(function) not in (_CAUSAL, _WINDOW, _PACKED) and maker not in _OTHER_MASKS:
        missed(f"transformers makes a mask by {maker}, which we do not know", MASKS.consequence)


def _knows_masks() -> bool:
    index = torch.zeros(1, 3, dtype=torch.int64)
    causal = masking_utils.sliding_window_causal_mask_function(2)
    causal = causal if _REMAP is None else _REMAP(causal, index)
    packed = masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(index))
    found = mask_structure(packed)
    return found is not None and found.index is index and found.window == 2


MASKS = Recognition(
    "transformers' masks of packed rows are not the code we know",
    "packed rows take a mask of the row's length squared",
    _knows_masks,
)


# transformers: attention


def is_usual_attention(function: Any) -> bool:
    """Whether a function is sdpa, or the usual eager one, which most families of transformers copy word by word."""
    if function is ALL_ATTENTION_FUNCTIONS["sdpa"]:
        return True
    return is_same_code(function, modeling_llama.eager_attention_forward) and check(EAGER)


@functools.cache
def is_attention(function: Any, sinks: bool, softcap: bool) -> bool:
    """Whether a function is softmax(scale * q k + mask) v, with the module's sinks, or its keyword `softcap`, if given.

    That is sdpa and the usual eager one, without either; another function of eager attention is tried, once.
    """
    code = code_of(function)
    if code is None:
        return False
    if is_usual_attention(function):
        return not (sinks or softcap)
    keywords = local_names(function)[5 : code.co_argcount + code.co_kwonlyargcount]  # behind the mask
    known = _KEYWORDS.issuperset(keywords) and not reads_rest(function)
    return known and _computes_attention(function, sinks, softcap)


_KEYWORDS = frozenset(("scaling", "dropout", "softcap", "s_aux", "sliding_window", "is_causal"))


@torch.no_grad()
def _computes_attention(function: Any, sinks: bool, softcap: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    q, k, v, mask = draw(2, 4, 5, 8) * 2, draw(2, 2, 5, 8), draw(2, 2, 5, 8), draw(2, 1, 5, 5)
    module: Any = nn.Module().eval()
    module.num_key_value_groups, module.head_dim, module.scaling = 2, 8, 0.5
    mask = mask.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    how: dict[str, Any] = {"scaling": 0.5, "dropout": 0.0}
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5
    if softcap:
        how["softcap"], scores = 1.5, 1.5 * torch.tanh(scores / 1.5)
    scores = scores + mask
    if sinks:
        how["s_aux"] = module.sinks = nn.Parameter(draw(4))
        scores = torch.cat([scores, module.sinks[:, None, None].expand(2, -1, 5, 1)], -1)
    try:
        found = function(module, q, k, v, mask, **how)[0]
    except Exception:  # of whatever it looks for in a module
        return False
    wanted = (scores.softmax(-1)[..., :5] @ v.repeat_interleave(2, 1)).transpose(1, 2)
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def _knows_eager() -> bool:
    """Whether Llama's eager attention computes softmax(q k / sqrt(d) + mask) v, and nothing more."""
    q, k, v = torch.linspace(-2, 2, 72, dtype=torch.float64).sin().reshape(3, 1, 2, 3, 4)
    module: Any = nn.Module().eval()
    module.num_key_value_groups = 1
    mask = torch.full((3, 3), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    found = modeling_llama.eager_attention_forward(module, q, k, v, mask, scaling=0.5, dropout=0.0)[0]
    # the function takes the softmax in fp32, whatever the dtype
    wanted = ((q @ k.mT * 0.5 + mask).softmax(-1) @ v).transpose(1, 2)
    return torch.allclose(found, wanted, rtol=1e-5)


EAGER = Recognition(
    "transformers' eager attention is not the code we know", "packed rows take the slower path", _knows_eager
)


# A module may run attention in another way, and then keeps it. The global's name is in every forward that transformers
# has converted to its registry, and in no other.
def asks_for_attention(kind: type) -> bool:
    """Whether a class of modules looks its attention up among the registered ones, by the configuration's name."""
    return "ALL_ATTENTION_FUNCTIONS" in names_read(inspect.unwrap(kind.forward))  # pyright: ignore


INTERFACE = Recognition(
    "transformers' attention does not look up its implementation as we know it",
    "packed rows are refused",
    lambda: asks_for_attention(modeling_llama.LlamaAttention),
)


def compares_with(kind: type, names: Any, besides: tuple[str, ...] = ()) -> bool:
    """Whether a method of a class, in its model's own file, has one of the `names` as a constant; not one of those
    called `besides`."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[-1].startswith("modeling_")]
    own = [base for base in own if base is not PreTrainedModel]  # whose file is called so too
    members = [member for base in own for member in vars(base).items() if member[0] not in besides]
    methods = [method for _, method in members if inspect.isfunction(method)]
    literals = [literal for method in methods for literal in constants(inspect.unwrap(method))]
    # a comparison with several, `x in ("sdpa", "eager")`, has them in a tuple
    return any(name == c or (isinstance(c, tuple) and name in c) for c in literals for name in names)


# Layers that share keys and values need not run for tokens whose logits nobody asks for. Gemma 4 leaves such tokens out
# by a method that asks which attention runs, and does not where `logits_to_keep` is a tensor.
SHARING_SLICES = "_maybe_slice_kv_shared_inputs"


def keep_whole(method: Any, *given: Any, **named: Any) -> Any:
    """Call the method of SHARING_SLICES, unbound, so that it leaves out none."""
    bound = inspect.signature(method).bind(*given, **named)
    bound.arguments["logits_to_keep"] = torch.zeros((), dtype=torch.int64)
    return method(*bound.args, **bound.kwargs)


@functools.cache
def can_keep_whole(kind: type) -> bool:
    """Whether a class has that method, and it then returns what it was given, tried with a number of logits to keep."""
    method = getattr(kind, SHARING_SLICES, None)
    if not inspect.isfunction(method):
        return False
    parameters = inspect.signature(method).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
    cache = {"cache", "past_key_values"} & set(names)  # the latter until transformers 5.23
    if "logits_to_keep" not in names or not cache:
        return False
    given = {name: torch.zeros(1, 3, 2, device="cpu") for name in names if name not in ("logits_to_keep", *cache)}
    how = given | {"logits_to_keep": 2} | dict.fromkeys(cache)
    found = keep_whole(method, SimpleNamespace(config=SimpleNamespace()), **how)
    wanted = list(given.values())
    return len(found) == len(wanted) and all(map(operator.is_, found, wanted))


def hands_over_ends(kind: type) -> bool:
    """Whether a class of attention hands the ends of its sequences to flash-attn, if that is what it runs."""
    forward = inspect.unwrap(kind.forward)  # pyright: ignore[reportAttributeAccessIssue]
    if not has_ends(kind) or "is_flash_attention_requested" not in names_read(forward):
        return False
    return global_of(forward, "is_flash_attention_requested") is is_flash_attention_requested


def has_ends(kind: type) -> bool:
    """Whether a class of modules is given the ends of sequences that lie end to end."""
    return "cu_seqlens" in local_names(inspect.unwrap(kind.forward))  # pyright: ignore[reportAttributeAccessIssue]


TOWERS = Recognition(
    "transformers' attention of vision towers is not the code we know",
    "it runs image by image",
    lambda: hands_over_ends(_model_class("qwen2_5_vl", "Qwen2_5_VLVisionAttention")),
)


# transformers: the rest of a model


_TRANSPOSES = frozenset(("transpose", "permute", "mT"))


def transposes_output(kind: type) -> bool:
    """Whether a class's forward transposes something, and reads no layout by `view`."""
    names = names_read(inspect.unwrap(kind.forward))  # pyright: ignore[reportAttributeAccessIssue]
    return not _TRANSPOSES.isdisjoint(names) and "view" not in names


PATCHES = Recognition(
    "transformers' patch embeddings are not the code we know",
    "images are cut by convolutions",
    lambda: transposes_output(_model_class("siglip", "SiglipVisionEmbeddings")),
)

PLACEHOLDER_MASK = "get_placeholder_mask"


@functools.cache
def counts_placeholders(kind: type) -> bool:
    """Whether a class has the method, compares features in it, and reads no more of the embeddings than their shape.

    Gemma 4's compares none: it is called before there are features or embeddings.
    """
    method = inspect.unwrap(getattr(kind, PLACEHOLDER_MASK, None) or nn.Module.forward)
    named = set(inspect.signature(method).parameters)
    compares = any(name.endswith("features") for name in named) and {"input_ids", "inputs_embeds"} <= named
    called = list(inspect.signature(getattr(kind, "forward", nn.Module.forward)).parameters)
    takes_images = called[1:2] == ["input_ids"] and "pixel_values" in called
    return compares and takes_images and not takes_item_of(method, "inputs_embeds")


PLACEHOLDERS = Recognition(
    "transformers' count of the placeholders of images is not the code we know",
    "each step waits for the tower",
    lambda: counts_placeholders(_model_class("llava", "LlavaModel")),
)


def calls_gate(function: Any) -> bool:
    """Whether the code that runs experts calls their gate as a method."""
    return GATE in names_read(function)


EXPERTS = Recognition(
    "transformers' experts are not the code we know",
    "their gates stay transformers' own",
    lambda: (
        calls_gate(ALL_EXPERTS_FUNCTIONS["grouped_mm"]) and hasattr(_model_class("qwen3_moe", "Qwen3MoeExperts"), GATE)
    ),
)


SOURCE = Recognition(
    *NO_SOURCE,
    lambda: forward_source(modeling_llama.LlamaAttention) is not None,
)


def calls_loss_function(kind: type) -> bool:
    """Whether the forward of a model's class, or one that it extends, uses `self.loss_function`."""
    forwards = (inspect.unwrap(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
    return any("loss_function" in names_read(forward) for forward in forwards)


def has_transformers_forward(kind: type) -> bool:
    """Whether the forward of a model's class is one of transformers, which use `loss_function` themselves or not."""
    return next(base for base in kind.__mro__ if "forward" in vars(base)).__module__.startswith("transformers.")


LOSS = Recognition(
    "transformers' models do not call their loss as we know it",
    "the loss is computed of stored logits",
    lambda: calls_loss_function(modeling_llama.LlamaForCausalLM),
)


def _knows_rotation() -> bool:
    name, attention = "apply_rotary_pos_emb", _model_class("qwen3", "Qwen3Attention")
    found = globals_read(attention.forward, lambda value: getattr(value, "__name__", None) == name)
    return name in found and always_reads_after(inspect.unwrap(attention.forward), "q_norm", [name])


ROTATION = Recognition(
    "transformers' attention does not rotate queries and keys as we know it",
    "rotations, and the norms before them, stay transformers' own",
    _knows_rotation,
)


def is_guarded_kernel(function: Any) -> bool:
    """Whether transformers (5.23, not yet 5.17) takes a kernel for a function, or refuses packed rows without one."""
    return inspect.isfunction(function) and "is_new_implementation" in outer_names(function)


def has_kernel(function: Any) -> bool:
    """Whether the kernel for such a function is installed."""
    return closed_over(function)["is_new_implementation"]


# transformers: output heads of tensor parallelism

_TP_FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"


def tensor_parallel_style(module: nn.Module) -> str | None:
    """Return the name of the style by which transformers' tensor parallelism has sharded a linear layer, else None."""
    # The layer's forward is a closure over the style, which nothing else holds. DTensor's placement says how the weight
    # is sharded, but not whether hidden states come replicated and logits leave gathered.
    forward: Any = vars(module).get("forward")
    if name_in_source(forward) == _TP_FORWARD:
        return type(closed_over(forward).get("self")).__name__
    theirs = (getattr(forward, "__module__", None) or "").startswith("transformers.")
    if theirs and isinstance(getattr(module, "weight", None), DTensor):
        check(TENSOR_PARALLEL)
    return None


def _knows_tensor_parallel() -> bool:
    try:
        module = importlib.import_module("transformers.distributed.tensor_parallel")
    except ImportError:  # an earlier release has it here
        module = importlib.import_module("transformers.integrations.tensor_parallel")
    install = module.TensorParallelLayer.install_forward
    made = [code for code in constants(install) if getattr(code, "co_qualname", None) == _TP_FORWARD]
    return any("self" in code.co_freevars for code in made) and hasattr(module, "ColwiseParallel")


TENSOR_PARALLEL = Recognition(
    "transformers' tensor parallelism is not the code we know",
    "logits of a sharded output head are stored",
    _knows_tensor_parallel,
)


# TRL


def forward_below_trl_head(forward: Any) -> Any:
    """Return the forward below TRL's fused head (`trl.trainer.utils.add_fused_lm_head`), None where it is not there."""
    function = getattr(forward, "__func__", None)
    if function is None or global_of(function, "__name__") != "trl.trainer.utils":
        return None
    return closed_over(function)["original_forward"]


def _knows_trl_head() -> bool:
    from trl.trainer.utils import add_fused_lm_head

    # the whole way, since the wrapper is a closure that only TRL's function can make
    config = modeling_llama.LlamaConfig(vocab_size=2, num_hidden_layers=0, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        model: Any = modeling_llama.LlamaForCausalLM(config)
    own = model.forward
    add_fused_lm_head(model)
    return forward_below_trl_head(model.forward) == own


TRL_HEAD = Recognition(
    "TRL's fused head is not the code we know", "ours is put on top of it, and not in its place", _knows_trl_head
)


def _knows_trl_constructor() -> bool:
    from trl.trainer import sft_trainer

    # replacing a name in a module that the constructor does not read would do nothing, without an error
    loads = "create_model_from_path" in names_read(inspect.unwrap(sft_trainer.SFTTrainer.__init__))
    return loads and hasattr(sft_trainer, "BaseTunerLayer")


TRL_CONSTRUCTOR = Recognition(
    "TRL's SFTTrainer does not load models and look for adapters as we know it",
    "models that lack weights in their files are let through, and adapters on lm_head are refused",
    _knows_trl_constructor,
)


# torch


def _knows_checkpoints() -> bool:
    inside = []

    def forward(x: Tensor) -> Tensor:
        inside.append(checkpoint_hook())
        return x * 2

    x = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # pyright: ignore[reportAttributeAccessIssue]
    return inside[0] is not None and checkpoint_hook() is None


CHECKPOINTS = Recognition(
    "torch's checkpoints are not the code we know",
    "an output head that a model checkpoints is not noticed",
    _knows_checkpoints,
)

RECOGNITIONS = (
    MASKS, EAGER, INTERFACE, TOWERS, PATCHES, PLACEHOLDERS, EXPERTS, SOURCE, LOSS, ROTATION, TENSOR_PARALLEL, TRL_HEAD,
    TRL_CONSTRUCTOR, CHECKPOINTS,
)  # fmt: skip
