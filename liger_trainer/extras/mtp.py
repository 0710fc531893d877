"""The head for multi-token prediction of a model's files, trained beside the model.

At position t the head reads what the model knows there, h_t behind its last norm, and the token that comes next, and
predicts the one after that:

    h'_t = norm(layer(fc [norm_e(e_{t+1}); norm_h(h_t)]))        logits of token t + 2 = output head(h'_t)

`layer` is a decoder layer like the model's, run with the mask and positions that one of the model's got in the same
pass. Embeddings e, hidden states h and the output head are the model's, without gradient: the head learns what the
model does, and the model learns what it would without the head.

Source    Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437, section 2.2, whose model learns too
"""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..common.mtp_head import COPIES, SHARD, head_in_files, head_in_folder
from ..errors import ConfigError
from ..losses.answers import DenseAnswer, as_teacher_answer, cross_entropy_loss
from ..losses.deferred_logits import DeferredLogits
from ..losses.model_parts import decoder_layers
from ..losses.spec import IGNORE_INDEX, BatchLoss, BatchTargets, Distillation, Logits, LossOptions, TeacherAnswer
from ..patching.patcher import base_of
from ..plugins import MTP, TrainerPlugin
from ..trainers.host import TrainerHost

_AGREEMENT = LossOptions(distillation=Distillation({"forward_kl": 0.0}, ce_weight=1.0))
_MIXERS = ("full_attention", "attention")


class Names(NamedTuple):
    """Names of a kin's heads in files, all below `root`. `parts` has beginnings there, and those of `MtpHead`'s."""

    root: str
    parts: Mapping[str, str]

    def of_files(self, own: str) -> str:
        """Return the name of a weight of `MtpHead` in files."""
        theirs, ours = next((theirs, ours) for theirs, ours in self.parts.items() if own.startswith(ours))
        return self.root + theirs + own.removeprefix(ours)

    def own(self, name: str) -> str:
        """Return the name in `MtpHead` of a name that files have below the root."""
        theirs, ours = next((theirs, ours) for theirs, ours in self.parts.items() if name.startswith(theirs))
        return ours + name.removeprefix(theirs)


QWEN = {"": ""}  # Qwen3-Next, Qwen3.5, Mellum, K-EXAONE: below mtp.
DEEPSEEK = {  # DeepSeek-V3, GLM-4.5 and later: a layer behind the last, with more in it
    "eh_proj.": "fc.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.",
    "shared_head.norm.": "norm.", "": "layers.0.",
}  # fmt: skip


class MtpHead(nn.Module):
    """The head, by the names that Qwen3.5's files give its weights, below `mtp.`; `load` reads them.

    Args:
        model: a causal LM, like one of whose decoder layers the head's is, and whose norm is copied.

    Attributes:
        names: in files; `load` finds them.
        copies: the names below the root of embedding and output head, where the files have the head's own of them.

    Raises:
        ConfigError: the model has no such norm.
    """

    names = Names(f"{MTP}.", QWEN)
    copies: tuple[str, ...] = ()

    def __init__(self, model: Any):
        super().__init__()
        path, blocks = decoder_layers(model)
        norm = getattr(model.get_submodule(path.rpartition(".")[0]), "norm", None)
        if norm is None:
            raise ConfigError(f"mtp_loss_weight: {type(model).__name__} has no norm behind its decoder layers.")
        config = model.config.get_text_config(decoder=True)
        block, width = blocks[_place(config, len(blocks))], config.hidden_size
        embedding = model.get_input_embeddings().weight
        layer = _layer_like(block, config, _place(config, len(blocks)), embedding.dtype)
        # no ModuleList, by which decoder layers are recognised
        self.layers = nn.ModuleDict({"0": layer.to_empty(device=str(embedding.device))})
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.fc = nn.utils.skip_init(
            nn.Linear, 2 * width, width, bias=False, dtype=embedding.dtype, device=str(embedding.device)
        )
        self.requires_grad_(True).train(model.training)
        self._pass: MtpPass | None = None
        # Registered once: CUDA graphs look at the model again where hooks come and go.
        blocks[0].register_forward_pre_hook(self._note_embeddings, with_kwargs=True)
        block.register_forward_pre_hook(self._note_arguments, with_kwargs=True)

    def load(self, model: Any, stored: Mapping[str, Tensor]) -> None:
        """Take the weights from tensors by the names of the files of `model`.

        Raises:
            ConfigError: there are none, or they are of a head of another form.
        """
        if not stored:
            raise ConfigError(
                f"mtp_loss_weight: the files of {type(model).__name__} hold no head for multi-token prediction. Leave "
                "mtp_loss_weight out."
            )
        path, blocks = decoder_layers(model)
        behind = f"layers.{len(blocks)}."
        root, names = re.compile(rf"{MTP}\."), Names(f"{MTP}.", QWEN)
        if not any(root.match(name) for name in stored):
            root, names = re.compile(rf"(.*\.)?{re.escape(behind)}"), Names(f"{path}.{len(blocks)}.", DEEPSEEK)
        below = {root.sub("", name, count=1): tensor for name, tensor in stored.items() if root.match(name)}
        copies = tuple(name for name in COPIES if names.parts is DEEPSEEK and name in below)
        wrong = next((name for name in stored if not root.match(name)), None) or self._take(
            model, {names.own(name): tensor for name, tensor in below.items() if name not in copies}, names
        )
        if wrong:
            raise ConfigError(
                "mtp_loss_weight: expected a head of one layer like the model's, with the names of Qwen3.5's or "
                f"DeepSeek-V3's, and {wrong} of {type(model).__name__}'s differs. Leave mtp_loss_weight out; the head "
                "stays as it is."
            )
        self.names, self.copies = names, copies or self.copies  # a file beside an adapter has none

    def _take(self, model: Any, found: dict[str, Tensor], names: Names) -> str | None:
        """Load weights by our names, but for experts, which files may have one by one. Return what does not fit."""
        config = model.config.get_text_config(decoder=True)
        of_layer = {name: found.pop(name) for name in list(found) if name.startswith("layers.")}
        place = _place(config, config.num_hidden_layers)
        try:
            loaded: Any = _OneLayer.from_pretrained(
                None, type(self.layers["0"]), place, config=config, state_dict=of_layer, dtype=torch.float32,
                attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except RuntimeError:  # of the experts some are missing
            return names.of_files("layers.0.mlp.experts")
        layer, info = loaded
        wrong = [*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])]
        own = {name: weight for name, weight in self.state_dict().items() if not name.startswith("layers.")}
        wrong += own.keys() ^ found.keys() or [n for n in own if own[n].shape != found[n].shape]
        if wrong:
            return names.of_files(min(wrong))
        self.load_state_dict({**found, **layer.state_dict()})
        return None

    def _note_embeddings(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._pass is not None:
            self._pass.embeddings = args[0] if args else kwargs["hidden_states"]

    def _note_arguments(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._pass is not None:
            named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._pass.arguments = args[1:], named

    @contextlib.contextmanager
    def noting(self, batch: "MtpPass") -> Iterator[None]:
        """Within the context, what the decoder layers get is noted in `batch`."""
        self._pass = batch
        try:
            yield
        finally:
            self._pass = None

    def forward(self, embeddings: Tensor, states: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Return h' (batch, length, H) of the embeddings of the next tokens and the model's hidden states."""
        both = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)], -1)
        output = self.layers["0"](self.fc(both), *args, **kwargs)
        return self.norm(output[0] if isinstance(output, tuple) else output)


class MtpPass:
    """The head's loss within one pass of the model. No dataclass: engines look into these.

    Args:
        weight: of the gradient.
        position_ids: (batch, length) that begin again in each document; None: each row is one.
    """

    def __init__(self, head: MtpHead, weight: float, position_ids: Tensor | None):
        self._head, self._weight = head, weight
        self._positions = position_ids if position_ids is not None and position_ids.dim() == 2 else None
        self._targets: BatchTargets | None = None
        self._answer: TeacherAnswer | None = None
        self.embeddings: Tensor | None = None
        self.arguments: tuple[tuple, dict[str, Any]] = (), {}

    def recording(
        self, targets: BatchTargets, teacher: Logits | TeacherAnswer | None
    ) -> contextlib.AbstractContextManager[None]:
        """Note what the model's layers get within the context. Its targets are made now: see `RowSelection`."""
        self._targets = predicted(targets, self._positions)
        self._answer = None if teacher is None else as_teacher_answer(teacher).for_targets(self._targets)
        return self._head.noting(self)

    def added_to(self, result: BatchLoss, logits: Logits, options: LossOptions) -> BatchLoss:
        """Return the result of a batch with the head's gradient added, and its values; the loss stays what it is."""
        targets, embeddings = self._targets, self.embeddings
        assert targets is not None
        if not isinstance(logits, DeferredLogits) or embeddings is None or logits.shape[:-1] != targets.shape:
            raise ConfigError(
                "mtp_loss_weight needs a loss that is computed from the hidden states of all positions, and this "
                "model's is not. Leave mtp_loss_weight out."
            )
        states = logits.hidden.detach()
        args, kwargs = self.arguments
        ahead = self._head(torch.roll(embeddings.detach(), -1, 1), states, args, kwargs)
        # each draft at the position before its token, where the model and its teacher predict the same one
        drafts = logits.of_states(torch.roll(ahead, 1, 1))
        values = {"mtp_share": targets.labels != IGNORE_INDEX}
        if torch.is_grad_enabled():
            if self._answer is None:
                own = cross_entropy_loss(drafts, targets, LossOptions())
            else:
                own = self._answer.loss(drafts, targets, options)
            # 0 with a gradient, so that the loss that is logged is the model's
            result = result._replace(loss=result.loss + self._weight * (own.loss - own.loss.detach()))
        else:
            own = DenseAnswer(logits.of_states(states)).loss(drafts, targets, _AGREEMENT)
            assert own.agrees is not None
            values["mtp_accepted"] = own.agrees
        values["mtp_loss"] = -own.log_prob
        noted = {name: value.to(own.log_prob) for name, value in values.items()}
        return result._replace(parts={**(result.parts or {}), **noted})


def predicted(targets: BatchTargets, position_ids: Tensor | None) -> BatchTargets:
    """Return the targets without the second token of each document, which no head before it predicts."""
    goes_on = torch.ones(targets.shape, dtype=torch.bool, device=targets.labels.device)
    if position_ids is not None:
        goes_on[:, 1:] = position_ids[:, 1:] == position_ids[:, :-1] + 1
    goes_on[:, 0] = False
    return targets.only(goes_on)


def _place(config: Any, count: int) -> int:
    """Return which of the decoder layers a head's is like: the last of the kind that the configuration has for heads,
    else the last with full attention."""
    types = getattr(config, "layer_types", None) or ["attention"] * count
    kinds = getattr(config, "mtp_layer_types", None) or _MIXERS
    return max((i for i, kind in enumerate(types) if kind in kinds), default=count - 1)


def _layer_like(block: nn.Module, config: Any, place: int, dtype: torch.dtype) -> nn.Module:
    """Return a layer of the class of `block` on the meta device, without its adapters, nor packed in four bits.

    Its modules find the attention that is asked for in the model's configuration.
    """
    dtypes = {name.replace(".base_layer", ""): weight.dtype for name, weight in block.state_dict().items()}
    with torch.device("meta"):
        layer: nn.Module = type(block)(config, place)
    for name, weight in layer.state_dict(keep_vars=True).items():
        kept = dtypes.get(name, dtype)
        weight.data = weight.data.to(kept if kept.is_floating_point or not weight.is_floating_point() else dtype)
    return layer


class _OneLayer(PreTrainedModel):
    """What transformers loads a head's layer into, since it knows which of a model's tensors files have in pieces."""

    def __init__(self, config: Any, layer: type[nn.Module], place: int):
        super().__init__(config)
        self.layers = nn.ModuleDict({"0": layer(config, place)})
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # whichever the configuration has

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # else the layer's class would not be loaded as in its model


def _renamed_for_files(model: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Have a model's `state_dict` name the head's weights as its files do, which `save_pretrained` writes."""
    head, own = getattr(model, MTP), f"{prefix}{MTP}."
    for name in [name for name in state if name.startswith(own)]:
        state[prefix + head.names.of_files(name.removeprefix(own))] = state.pop(name)
    for name in head.copies:  # no shared memory, which `save_pretrained` leaves out
        state[prefix + head.names.root + name] = getattr(model, COPIES[name])().weight.detach().clone()


def _renamed_from_files(model: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Have a model's `load_state_dict` take what its `state_dict` returns."""
    head, root = getattr(model, MTP), prefix + getattr(model, MTP).names.root
    for name in [name for name in state if name.startswith(root)]:
        tensor, below = state.pop(name), name.removeprefix(root)
        if below not in head.copies:
            state[f"{prefix}{MTP}.{head.names.own(below)}"] = tensor


class MtpPlugin(TrainerPlugin):
    """`mtp_loss_weight` for the trainers. One without it leaves the head of an earlier trainer as it is."""

    def before_patch(self, trainer: TrainerHost) -> None:
        """Add the head to a trainer's model, unless an earlier trainer has."""
        if _weight(trainer):
            _check(trainer)
            model = base_of(trainer.model)
            if not hasattr(model, MTP):
                head = MtpHead(model)
                head.load(model, _read(head_in_files, model))
                setattr(model, MTP, head)
                model.register_state_dict_post_hook(_renamed_for_files)
                model.register_load_state_dict_pre_hook(_renamed_from_files)

    def check(self, trainer: TrainerHost) -> None:
        """Have the head trained or left alone, whichever trainer of the model came last."""
        head = getattr(base_of(trainer.model), MTP)
        if isinstance(head, MtpHead):  # else a part of the model's own class
            head.requires_grad_(_weight(trainer) > 0)

    def of_batch(self, trainer: TrainerHost, inputs: dict[str, Any]) -> dict[str, Any]:
        weight = _weight(trainer)
        head = getattr(base_of(trainer.model), MTP)
        return {"mtp_pass": MtpPass(head, weight, inputs.get("position_ids"))} if weight else {}

    def saved(self, trainer: TrainerHost, folder: Path) -> None:
        """Write the head beside an adapter. It is in the files of a whole model."""
        model = base_of(trainer.model)
        if hasattr(trainer.model, "peft_config") and isinstance(getattr(model, MTP), MtpHead):
            names = model.mtp.names
            head = {names.of_files(name): weight for name, weight in model.mtp.state_dict().items()}
            in_files = revert_weight_conversion(model, head)
            save_file({n: w.contiguous() for n, w in in_files.items()}, folder / SHARD, metadata={"format": "pt"})

    def loaded(self, trainer: TrainerHost, folder: Path) -> None:
        """Read the head of a checkpoint: beside an adapter, or where the files have its experts one by one."""
        model = base_of(trainer.model)
        if isinstance(head := getattr(model, MTP), MtpHead):
            head.load(model, _read(head_in_folder, model, folder))


PLUGIN = MtpPlugin()


def _read(read: Callable[..., dict[str, Tensor]], *where: Any) -> dict[str, Tensor]:
    try:
        return read(*where)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"mtp_loss_weight: the head for multi-token prediction cannot be read: {error}") from None


def _weight(trainer: TrainerHost) -> float:
    return getattr(trainer.args, "mtp_loss_weight", 0.0)  # TRL's own arguments have no such field


def _learns_tokens(args: Any) -> bool:
    """Whether the loss of a trainer's arguments is about tokens, too, and not only about hidden states."""
    if not hasattr(args, "loss_plan"):  # without a teacher
        return True
    plan = args.loss_plan()
    return any(
        term.family != "hidden" and (term.weight or f"{term.type}_weight" in plan.schedules) for term in plan.terms
    )


def _check(trainer: TrainerHost) -> None:
    reasons = {
        "prompts that are trained, which lengthen rows": any(
            adapter.is_prompt_learning for adapter in getattr(trainer.model, "peft_config", {}).values()
        ),
        "FSDP, which shards the model's parts": trainer.is_fsdp_enabled,
        "DeepSpeed, which steps by itself": trainer.is_deepspeed_enabled,
        "tensor parallelism": trainer.get_tp_size() > 1,
        "sequence parallelism, which cuts rows between a token and the next": trainer.shards_sequences(),
        "compute_loss_func, which takes the place of the fused loss": trainer.compute_loss_func is not None,
        "model_init, whose model has no head": getattr(trainer, "model_init", None) is not None,
        "an optimizer that was made before the head: give its class by optimizer_cls_and_kwargs": (
            trainer.optimizer is not None
        ),
        "losses between hidden states alone, of which its head learns nothing: add a divergence or ce": (
            not _learns_tokens(trainer.args)
        ),
        "a model that has a part of its own called mtp": not isinstance(
            getattr(base_of(trainer.model), MTP, None), MtpHead | None
        ),
        "a model on several devices": len({p.device for p in trainer.model.parameters()}) > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"mtp_loss_weight does not go with {reason}.")
