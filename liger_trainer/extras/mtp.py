"""The head for multi-token prediction of a model's files, trained beside the model.

At position t the head reads what the model knows there, h_t behind its last norm, and the token that comes next, and
predicts the one after that:

    h'_t = norm(layer(fc [norm_e(e_{t+1}); norm_h(h_t)]))        logits of token t + 2 = output head(h'_t)

`layer` is a decoder layer of the model, run with the mask and positions that the model's own got in the same pass.
Embeddings e, hidden states h and the output head are the model's, without gradient: the head learns what the model
does, and the model learns what it would without the head.

Source    Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437, section 2.2, whose model learns too
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import pad

from ..common.mtp_head import head_in_files
from ..errors import ConfigError
from ..losses.answers import DenseAnswer, cross_entropy_loss
from ..losses.deferred_logits import DeferredLogits
from ..losses.model_parts import decoder_layers
from ..losses.spec import IGNORE_INDEX, BatchLoss, BatchTargets, Distillation, Logits, LossOptions
from ..patching.patcher import base_of
from ..plugins import MTP, TrainerPlugin
from ..trainers.host import TrainerHost

_AGREEMENT = LossOptions(distillation=Distillation({"forward_kl": 0.0}, ce_weight=1.0))
_MIXERS = ("full_attention", "attention")


class MtpHead(nn.Module):
    """The head, by the names that Qwen3.5's files give its weights, below `mtp.`; `load` reads them.

    Args:
        model: a causal LM, whose decoder layer and norm are copied.

    Raises:
        ConfigError: the model has no such norm.
    """

    def __init__(self, model: Any):
        super().__init__()
        path, blocks = decoder_layers(model)
        norm = getattr(model.get_submodule(path.rpartition(".")[0]), "norm", None)
        if norm is None:
            raise ConfigError(f"mtp_loss_weight: {type(model).__name__} has no norm behind its decoder layers.")
        config = model.config.get_text_config(decoder=True)
        types = getattr(config, "layer_types", None) or ["attention"] * len(blocks)
        place = max((i for i, kind in enumerate(types) if kind in _MIXERS), default=len(blocks) - 1)
        block, width = blocks[place], config.hidden_size
        # Modules find the attention that is asked for in the model's configuration, which stays one.
        kept = {id(module.config): module.config for module in block.modules() if hasattr(module, "config")}
        # no ModuleList, by which decoder layers are recognised
        self.layers = nn.ModuleDict({"0": copy.deepcopy(block, kept)})
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (copy.deepcopy(norm) for _ in range(3))
        weight = next(block.parameters())
        self.fc = nn.utils.skip_init(
            nn.Linear, 2 * width, width, bias=False, dtype=weight.dtype, device=str(weight.device)
        )
        self.train(model.training)
        self._pass: MtpPass | None = None
        # Registered once: CUDA graphs look at the model again where hooks come and go.
        blocks[0].register_forward_pre_hook(self._note_embeddings, with_kwargs=True)
        block.register_forward_pre_hook(self._note_arguments, with_kwargs=True)

    def load(self, model: Any) -> None:
        """Take the weights from the model's files.

        Raises:
            ConfigError: they have no such head, or one of another form.
        """
        try:
            stored = {name.removeprefix(f"{MTP}."): tensor for name, tensor in head_in_files(model).items()}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"mtp_loss_weight: the head for multi-token prediction cannot be read: {error}") from None
        if not stored:
            raise ConfigError(
                f"mtp_loss_weight: the files of {type(model).__name__} hold no head for multi-token prediction. Leave "
                "mtp_loss_weight out."
            )
        own = self.state_dict()
        wrong = sorted(own.keys() ^ stored.keys()) or [n for n in own if own[n].shape != stored[n].shape]
        if wrong:
            raise ConfigError(
                f"mtp_loss_weight: expected a head of one layer like the model's, with the names of Qwen3.5's, and "
                f"{wrong[0]} of {type(model).__name__}'s differs. Leave mtp_loss_weight out; the head stays as it is."
            )
        self.load_state_dict(stored)

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
        self.embeddings: Tensor | None = None
        self.arguments: tuple[tuple, dict[str, Any]] = (), {}

    def recording(self, targets: BatchTargets) -> contextlib.AbstractContextManager[None]:
        """Note what the model's layers get within the context. Its targets are made now: see `RowSelection`."""
        self._targets = targets_ahead(targets, self._positions)
        return self._head.noting(self)

    def added_to(self, result: BatchLoss, logits: Logits) -> BatchLoss:
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
        drafts = logits.of_states(ahead)
        if torch.is_grad_enabled():
            own = cross_entropy_loss(drafts, targets, LossOptions())
            # 0 with a gradient, so that the loss that is logged is the model's
            result = result._replace(loss=result.loss + self._weight * (own.loss - own.loss.detach()))
        else:
            verifier = DenseAnswer(logits.of_states(torch.roll(states, -1, 1)))
            own = verifier.loss(drafts, targets, _AGREEMENT)
        values = {"mtp_loss": -own.log_prob, "mtp_accepted": own.agrees, "mtp_share": targets.labels != IGNORE_INDEX}
        noted = {name: value.to(own.log_prob) for name, value in values.items() if value is not None}
        return result._replace(parts={**(result.parts or {}), **noted})


def targets_ahead(targets: BatchTargets, position_ids: Tensor | None) -> BatchTargets:
    """Return the labels, and weights, that the positions after these predict, within each document."""

    def next_of(values: Tensor, filling: float) -> Tensor:
        return pad(values.view(targets.shape)[:, 1:], (0, 1), value=filling)

    labels = next_of(targets.labels, IGNORE_INDEX)
    if position_ids is not None:
        goes_on = pad(position_ids[:, 1:] == position_ids[:, :-1] + 1, (0, 1))
        labels = labels.masked_fill(~goes_on.to(labels.device), IGNORE_INDEX)
    ahead = BatchTargets.of(None, labels, targets.num_items)
    return ahead if targets.weights is None else replace(ahead, weights=next_of(targets.weights, 0.0).flatten())


class MtpPlugin(TrainerPlugin):
    """`mtp_loss_weight` for the trainers. One without it leaves the head of an earlier trainer as it is."""

    def before_patch(self, trainer: TrainerHost) -> None:
        """Add the head to a trainer's model, unless an earlier trainer has."""
        if _weight(trainer):
            _check(trainer)
            model = base_of(trainer.model)
            if not hasattr(model, MTP):
                head = MtpHead(model)
                head.load(model)
                setattr(model, MTP, head)

    def check(self, trainer: TrainerHost) -> None:
        """Have the head trained or left alone, whichever trainer of the model came last."""
        head = getattr(base_of(trainer.model), MTP)
        if isinstance(head, MtpHead):  # else a part of the model's own class
            head.requires_grad_(_weight(trainer) > 0)

    def of_batch(self, trainer: TrainerHost, inputs: dict[str, Any]) -> dict[str, Any]:
        weight = _weight(trainer)
        head = getattr(base_of(trainer.model), MTP)
        return {"mtp_pass": MtpPass(head, weight, inputs.get("position_ids"))} if weight else {}


PLUGIN = MtpPlugin()


def _weight(trainer: TrainerHost) -> float:
    return getattr(trainer.args, "mtp_loss_weight", 0.0)  # TRL's own arguments have no such field


def _check(trainer: TrainerHost) -> None:
    reasons = {
        "adapters, whose files do not hold the head": hasattr(trainer.model, "peft_config"),
        "FSDP, which shards the model's parts": trainer.is_fsdp_enabled,
        "DeepSpeed, which steps by itself": trainer.is_deepspeed_enabled,
        "tensor parallelism": trainer.get_tp_size() > 1,
        "sequence parallelism, which cuts rows between a token and the next": trainer.shards_sequences(),
        "compute_loss_func, which takes the place of the fused loss": trainer.compute_loss_func is not None,
        "model_init, whose model has no head": getattr(trainer, "model_init", None) is not None,
        "an optimizer that was made before the head: give its class by optimizer_cls_and_kwargs": (
            trainer.optimizer is not None
        ),
        "a model that has a part of its own called mtp": not isinstance(
            getattr(base_of(trainer.model), MTP, None), MtpHead | None
        ),
        "a model on several devices": len({p.device for p in trainer.model.parameters()}) > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"mtp_loss_weight does not go with {reason}.")
