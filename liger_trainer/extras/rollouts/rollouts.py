"""Completions decoded by a model in this process, with the weights that train, in CUDA graphs.

All prompts are read in one flat row (prefill), each by itself. Then every row gets one token a step: the model's own
modules, attention over the keys that the row has kept (kernels/decode_attention.py), a draw (kernels/draw_tokens.py).
The step of a number of rows is recorded once and replayed, and the host looks only every CHUNK steps whose completion
has ended. Those rows leave, waiting prompts take their place, and where few are left a smaller graph goes on.

Graphs hold the addresses of weights, not of kept keys and values, whose memory is given back after each rollout.
transformers' continuous batching and the engines of vLLM and SGLang record decoding by sizes in the same way; a cache
whose `update` returns its inputs, so that a registered attention reads the rest, lets any model do so that calls its
attention by transformers' interface.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import AttentionInterface, Cache, GenerationConfig
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ...common.replacements import replaced
from ...compat.models import ATTENTION, adapter_switches, attention_implementation
from ...kernels.decode_attention import decode_attention, places_of
from ...kernels.draw_tokens import draw_tokens, note_tokens
from ...patching.graphs.recorder import Recorder, free_memory
from ...patching.layers.rotary import Rotated
from ...patching.packing.packed_attention import NAMES, PackedAttention, attention_configs
from ...patching.patcher import base_of
from ...trainers.decoder import NotServed, Tokens
from .decoding_layers import DecodingLayers
from .support import adapters_merged, why_not

NAME = "liger_rollout"
CHUNK = 16  # steps between two looks at who has ended: a look waits for the GPU, a step takes 1 to 5 ms
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a step
MEMORY = 0.8  # of what is free, for keys and values
PROVED_ROWS, PROVED_STEPS = 4, 8


class KeptKeys(Cache):
    """Keys and values of all slots, which attention reads by itself: `update` returns what it gets.

    Attributes:
        keys, values: of each layer, (slots, heads, longest, width).
        places: (layers, 3) int64 on the device, where they are (`places_of`).
        latest: the key that each layer has handed over last.
        prompts: in a prefill, where each token of the flat row is kept: its slot and its position.
    """

    def __init__(self, layers: int, device: torch.device):
        super().__init__(layers=[_Layer() for _ in range(layers)])  # pyright: ignore[reportArgumentType]
        self.places = torch.zeros(layers, 3, dtype=torch.int64, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.latest: list[Tensor | None] = [None] * layers
        self.prompts: tuple[Tensor, Tensor] | None = None

    def allocate(self, slots: int, heads: int, longest: int, width: int, like: Tensor) -> None:
        shape = (2 * len(self.latest), slots, heads, longest, width)
        memory = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.keys, self.values = list(memory[::2]), list(memory[1::2])
        self.places.copy_(torch.tensor([places_of(*pair) for pair in zip(self.keys, self.values, strict=True)]))

    def release(self) -> None:
        self.keys, self.values, self.latest, self.prompts = [], [], [None] * len(self.latest), None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.latest[layer_idx] = key_states
        if self.prompts is not None:
            slots, at = self.prompts
            for kept, new in ((self.keys, key_states), (self.values, value_states)):
                kept[layer_idx][slots, :, at] = new[0].transpose(0, 1).to(kept[layer_idx].dtype)
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        raise NotServed("the model asks how many tokens there are, which differs from row to row")

    def get_mask_sizes(self, *_: Any, **__: Any) -> Any:
        raise NotServed("the model asks for a mask")


class _Layer:
    """What transformers asks the layers of a cache."""

    is_compileable, is_sliding, is_initialized = True, False, True


_current: ContextVar["Rollouts"] = ContextVar("rollouts")


def _attention(
    module: Any, query: Any, key: Any, value: Tensor, attention_mask: None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention of the flat row of prompts, or of one token a row. See transformers' AttentionInterface.

    Queries and keys of one token a row are `Rotated`, where the attention rotates them.
    """
    rollouts = _current.get()
    kept, layer = rollouts.kept, module.layer_idx
    if kept.latest[layer] is not key or s_aux is not None:
        raise NotServed("a layer's attention reads other keys than it has kept")
    if kept.prompts is not None:
        ends, longest = rollouts.documents
        how: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "dropout": 0.0}
        how |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        return PackedAttention(rollouts.former)(module, query, key, value, None, **how)[0], None
    rotation, q, k = None, query, key
    if isinstance(query, Rotated) and isinstance(key, Rotated):
        q, k, rotation = query.x, key.x, query.rotation
    # under autocast norms and rotations may hand over fp32, which sdpa would cast too
    q, k, v = (x[:, :, 0].to(kept.keys[layer].dtype) for x in (q, k, value))
    o = decode_attention(
        q, k, v, kept.keys[layer], kept.values[layer], rollouts.step.slot, rollouts.step.length,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=softcap, window=sliding_window,
        places=kept.places[layer], rotation=rotation,
    )  # fmt: skip
    return o[:, None], None


AttentionInterface.register(NAME, _attention)


class Step:
    """What one step of so many rows reads and writes, at addresses that stay.

    Attributes:
        token: (size,) int64, what each row reads next.
        slot, length: (size,) int32, where its keys are kept and how many.
        count: (size,) int32, the tokens that were drawn for it.
        row: (size,) int32, its place among the prompts.
        done: (size,) bool, whether its completion has ended; then nothing of it changes any more.
    """

    NAMES = ("token", "slot", "length", "count", "row", "done")

    def __init__(self, size: int, device: torch.device):
        self.token = torch.zeros(size, dtype=torch.int64, device=device)
        self.slot, self.length, self.count, self.row = torch.zeros(4, size, dtype=torch.int32, device=device)
        self.done = torch.ones(size, dtype=torch.bool, device=device)
        self.replay: Any = None

    def state(self, rows: Tensor | slice = slice(None)) -> dict[str, Tensor]:
        """Return a copy of the state of some rows, or of all."""
        return {name: getattr(self, name)[rows].clone() for name in self.NAMES}

    def take(self, state: dict[str, Tensor], spare_slot: int) -> None:
        """Go on from a state of as many rows or fewer. What is left over is done, and has a slot that nobody reads."""
        rows = len(state["token"])
        for name in self.NAMES:
            x = getattr(self, name)
            x[:rows] = state[name]
            x[rows:] = {"done": True, "slot": spare_slot}.get(name, 0)


class Rollouts:
    """Decodes completions of one model.

    Args:
        model: a transformers or PEFT model, on one device, in eval mode whenever it samples.
        settings: how tokens are drawn. `why_not` says what is served.
        recorder: records a step, such as `CudaRecorder`; None: steps run as they are.

    Raises:
        NotServed: another way of sampling has to be taken.
    """

    def __init__(self, model: Any, settings: GenerationConfig, recorder: type[Recorder] | None):
        reason = why_not(model, settings)
        if reason is not None:
            raise NotServed(reason)
        self._model = base = base_of(model)
        self._device = next(base.parameters()).device
        self._recorder = None if recorder is None else recorder(self._device)
        names = inspect.signature(inspect.unwrap(type(base).forward)).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # its name before transformers 5.24
        self.former = next(f for f, name in NAMES.items() if attention_implementation(base.config) in (f, name))
        text = base.config.get_text_config()
        self.kept = KeptKeys(text.num_hidden_layers, self._device)
        self._layers = DecodingLayers(base)
        self._limit: int = settings.max_new_tokens  # pyright: ignore[reportAttributeAccessIssue]
        ends = settings.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        self._ends = torch.tensor(ends or [-1], device=self._device)
        self._banned = _banned(base, settings)
        self._temperature = float(settings.temperature or 1.0) if settings.do_sample else 0.0
        self._warpers = _warpers(settings)
        self._seed = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._most = torch.zeros(1, dtype=torch.int32, device=self._device)  # tokens of a completion
        self._steps: dict[int, Step] = {}
        self._drawn = torch.zeros(0, 0, dtype=torch.int64, device=self._device)  # of each slot
        self._recorded: tuple[Any, ...] = ()
        self._proved = False
        self._logits: list[Tensor] | None = None  # of all draws, in the trial of a proof
        self.documents: tuple[Tensor, int] = (self._ends, 0)  # of a flat row: ends, and the longest
        self.step = Step(1, self._device)  # the one that runs

    @torch.no_grad()
    def complete(
        self, prompts: Sequence[Tokens], seed: int, most_rows: int | None = None, most_tokens: int | None = None,
        tell: Callable[[Tokens, bool], None] | None = None,
    ) -> list[Tokens]:  # fmt: skip
        """Return a completion for each prompt, with the token that ended it.

        Args:
            prompts: token ids, none empty.
            seed: of the draws, which depend on nothing but it, the place of a prompt among `prompts`, and the weights.
            most_rows: decoded at once; default: as many as there are prompts, SIZES and memory allowed.
            most_tokens: of a completion, at most the settings' `max_new_tokens`, which is the default.
            tell: of a single prompt, gets what has been written so far at each look, and whether that is all.

        Raises:
            NotServed: the model does not compute here what it computes elsewhere.
        """
        if not prompts:
            return []
        with adapters_merged(self._model):
            if not self._proved:
                self._prove(prompts[:PROVED_ROWS])
            rows = min(most_rows or len(prompts), len(prompts), SIZES[-1])
            return self._completed(prompts, seed, rows, min(most_tokens or self._limit, self._limit), tell)

    def _completed(
        self, prompts: Sequence[Tokens], seed: int, most_rows: int, most_tokens: int,
        tell: Callable[[Tokens, bool], None] | None = None,
    ) -> list[Tokens]:  # fmt: skip
        token = _current.set(self)
        try:
            with _attention_is(self._model, NAME):
                self._seed.fill_(seed)
                self._most.fill_(most_tokens)
                return self._decode(prompts, self._allocate(prompts, most_rows, most_tokens), tell)
        finally:
            self.kept.release()
            _current.reset(token)

    def _decode(
        self, prompts: Sequence[Tokens], slots: int, tell: Callable[[Tokens, bool], None] | None
    ) -> list[Tokens]:
        waiting = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))  # rows of like length read together
        free, rows = list(range(slots)), list[int]()
        state = {name: getattr(Step(0, self._device), name) for name in Step.NAMES}
        completions: list[Tokens] = [[] for _ in prompts]
        refill = max(1, slots // 4)  # so many at once: reading prompts costs as much as many steps
        while waiting or rows:
            if waiting and len(free) >= min(refill, len(waiting)):
                new, waiting = waiting[: len(free)], waiting[len(free) :]
                begun = self._read(prompts, new, [free.pop() for _ in new])
                state = {name: torch.cat([state[name], begun[name]]) for name in Step.NAMES}
                rows += new
            size = next(size for size in SIZES if size >= len(rows))
            step = self._steps.setdefault(size, Step(size, self._device))
            step.take(state, slots)
            left = len(rows)
            while left and not (waiting and slots - left >= min(refill, len(waiting))):
                for _ in range(CHUNK):
                    self._run(step)
                left = len(rows) - int(step.done[: len(rows)].sum())
                if tell is not None:
                    tell(self._drawn[step.slot[0], : step.count[0]].tolist(), not left)
                if any(left <= smaller for smaller in SIZES if smaller < size):
                    break
            done, slot, counts = (x[: len(rows)].tolist() for x in (step.done, step.slot, step.count))
            drawn = self._drawn.tolist() if any(done) else []
            for row, is_done, at, count in zip(rows, done, slot, counts, strict=True):
                if is_done:
                    completions[row] = drawn[at][:count]
                    free.append(at)
            keep = [i for i, is_done in enumerate(done) if not is_done]
            state = step.state(torch.tensor(keep, dtype=torch.int64, device=self._device))
            rows = [rows[i] for i in keep]
        return completions

    def _read(self, prompts: Sequence[Tokens], rows: list[int], slots: list[int]) -> dict[str, Tensor]:
        """Read prompts in one flat row, and draw the first token of each. Return the state of these rows."""
        lengths = torch.tensor([len(prompts[row]) for row in rows])
        ends = lengths.cumsum(0)
        at = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(self._device)
        of_tokens = torch.tensor(slots).repeat_interleave(lengths).to(self._device)
        self.documents = torch.nn.functional.pad(ends, (1, 0)).to(self._device, torch.int32), int(lengths.max())
        self.kept.prompts = of_tokens, at
        flat = torch.tensor([token for row in rows for token in prompts[row]], device=self._device)
        with self._layers.in_use(one_token=False):  # which also spares PEFT's layers, merged by now, their checks
            logits = self._forward(flat[None], at[None], logits_to_keep=(ends - 1).to(self._device))[0]
        self.kept.prompts = None
        step = Step(len(rows), self._device)
        step.slot.copy_(torch.tensor(slots))
        step.length.copy_(lengths - 1)  # the draw adds one
        step.row.copy_(torch.tensor(rows))
        step.done.fill_(False)
        self._draw(step, logits)
        return step.state()

    def _forward(self, ids: Tensor, positions: Tensor, **how: Any) -> Tensor:
        cache = {self._cache_name: self.kept}
        return self._model(input_ids=ids, position_ids=positions, use_cache=True, **cache, **how).logits

    def _draw(self, step: Step, logits: Tensor) -> None:
        """Draw a token for each row and note it, unless the row is done."""
        if self._logits is not None:
            self._logits.append(logits.float())
        if self._warpers:
            scores = logits.float() / (self._temperature or 1.0)
            for warp in self._warpers:
                scores = warp(None, scores)
            token = draw_tokens(scores, self._seed, step.row, step.count, temperature=1.0, banned=self._banned)
        else:
            token = draw_tokens(
                logits, self._seed, step.row, step.count, temperature=self._temperature, banned=self._banned
            )
        state = (step.slot, step.token, step.count, step.length, step.done)
        note_tokens(token, self._drawn, *state, self._ends, self._most)

    def _one_token(self, step: Step) -> None:
        self.step = step
        with self._layers.in_use(one_token=True):
            logits = self._forward(step.token[:, None], step.length[:, None].long())[:, -1]
        self._draw(step, logits)

    def _run(self, step: Step) -> None:
        """Run a step; the first time, record it."""
        if self._recorder is None:
            return self._one_token(step)
        if step.replay is None:
            state = step.state()
            step.done.fill_(True)  # the rehearsal writes keys that are written again
            device = self._device.type
            # a graph that kept weights which autocast has cast would not see them change
            with torch.autocast(
                device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache_enabled=False
            ):
                try:
                    with self._recorder.rehearsing():
                        self._one_token(step)
                except Exception as error:
                    raise NotServed(f"its step cannot be recorded ({str(error).splitlines()[0]})") from error
                step.replay = self._recorder.record(lambda: (self._one_token(step), [])[1])[1]
            step.take(state, 0)
        step.replay()

    def _allocate(self, prompts: Sequence[Tokens], most: int, most_tokens: int) -> int:
        """Make room for keys and values; return for how many rows, and take those graphs back that no longer hold."""
        text = self._model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        longest = max(map(len, prompts)) + most_tokens
        kind = self._device.type
        weight = next(p for p in self._model.parameters() if p.dim() == 2)
        like = weight.new_empty(0, dtype=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        row = 2 * text.num_hidden_layers * heads * longest * width * like.element_size()
        free = free_memory(self._device)
        slots = most if free is None else min(most, max(1, int(MEMORY * free) // row - 1))
        self.kept.allocate(slots + 1, heads, longest, width, like)  # one that nobody reads
        if len(self._drawn) < slots + 1:
            self._drawn = torch.zeros(slots + 1, self._limit + 1, dtype=torch.int64, device=self._device)
        self._layers.make_room(longest)
        recorded = (self._drawn.data_ptr(), self._layers.positions, like.dtype, *_constants(self._model))
        if recorded != self._recorded:
            self._steps, self._recorded = {}, recorded
        return slots

    def _prove(self, prompts: Sequence[Tokens]) -> None:
        """Compare the logits of a few steps with those of plain forward passes over the same tokens.

        Raises:
            NotServed: they differ.
        """
        prompts = sorted(prompts, key=len, reverse=True)  # the order in which they are read
        trial = Rollouts(self._model, GenerationConfig(max_new_tokens=PROVED_STEPS + 1), None)
        trial._logits = []
        drawn = trial._completed(prompts, 0, len(prompts), PROVED_STEPS + 1)
        if len(trial._logits[0]) < len(prompts):
            raise NotServed("the GPU lacks the memory for keys and values")
        logits = [of_step[: len(prompts)] for of_step in trial._logits[: PROVED_STEPS + 1]]
        got = torch.stack(logits, 1)  # (rows, steps, V)
        want = torch.stack([
            self._model(
                input_ids=torch.tensor([[*prompt, *more[:-1]]], device=self._device), use_cache=False,
                logits_to_keep=PROVED_STEPS + 1,
            ).logits[0].float()
            for prompt, more in zip(prompts, drawn, strict=True)
        ])  # fmt: skip
        gap = ((got - want).norm() / want.norm()).item()
        dtype, kind = next(self._model.parameters()).dtype, self._device.type
        exact = dtype == torch.float32 and not torch.is_autocast_enabled(kind)
        if not gap <= (1e-3 if exact else 0.1):  # other keys or positions than its own make it about 1
            raise NotServed(f"its logits, token by token, are {gap:.0%} away from those of whole rows")
        self._proved = True


@contextmanager
def _attention_is(model: Any, name: str) -> Iterator[None]:
    """Within, the model calls the attention that is registered under this name."""
    with ExitStack() as stack:
        for config in attention_configs(model):
            stack.enter_context(replaced(config, **{ATTENTION: name}))
        yield


def _constants(model: Any) -> tuple[Any, ...]:
    """Return what a graph holds that may change between two rollouts: where weights are, and which module runs.

    The settings of adapters are not among it: merged or switched off, a layer with adapters is its base. PEFT's wrapper
    of a module that is trained as a whole (`modules_to_save`) calls its copy or the original.
    """
    wrappers = (module for module in adapter_switches(model) if not isinstance(module, BaseTunerLayer))
    chosen = ((module.disable_adapters, *module.active_adapters) for module in wrappers)
    return *(p.data_ptr() for p in model.parameters()), *chosen


def _banned(model: Any, settings: GenerationConfig) -> Tensor | None:
    """Return which tokens of a model's head are not drawn."""
    if not settings.suppress_tokens:
        return None
    head = model.get_output_embeddings().weight
    banned = torch.zeros(head.shape[0], dtype=torch.bool, device=head.device)
    banned[torch.tensor(settings.suppress_tokens, device=head.device)] = True
    return banned


def _warpers(settings: GenerationConfig) -> list[Any]:
    """Return transformers' own filters of likely tokens, in its order."""
    if not settings.do_sample:
        return []
    top_k, top_p, min_p = settings.top_k or 0, settings.top_p or 1.0, settings.min_p
    return [
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ]
