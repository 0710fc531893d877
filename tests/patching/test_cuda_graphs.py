"""Decoder layers in graphs: without a GPU what is recorded runs again (RunsAgain), on one it is CUDA's graphs."""

import contextlib
import copy
import random
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from peft import LoraConfig, get_peft_model
from recorders import RunsAgain
from tiny import VOCAB, tiny_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig

from liger_trainer import patch
from liger_trainer.common.replacements import Replacements
from liger_trainer.compat.sft_trainer import DataCollatorForLanguageModeling, with_lengths
from liger_trainer.errors import ConfigError
from liger_trainer.patching.graphs import cuda_graphs
from liger_trainer.patching.graphs import recorder as graph_recorder
from liger_trainer.patching.graphs.cuda_graphs import GraphedLayers
from liger_trainer.patching.graphs.layer_graphs import NotCapturable
from liger_trainer.patching.patcher import base_of, patched_record
from liger_trainer.trainers.ddp_gradients import GradientBuckets, spare_copies_of_gradients
from liger_trainer.trainers.step_graphs import FixedShapes


@pytest.fixture(autouse=True)
def count_replays(monkeypatch):
    monkeypatch.setattr(RunsAgain, "replays", 0)


def lora(model, dropout=0.0):
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(model, config)


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def pair(change=lambda model: model, family="qwen3", recorder=RunsAgain, **options):
    """Two equal models in training; the layers of the second are in graphs."""
    models = []
    for _ in range(2):
        model = change(tiny_model(family, num_hidden_layers=3)).train()
        base_of(model).config.use_cache = False
        patch(model)
        models.append(model)
    return *models, GraphedLayers(base_of(models[1]), recorder=recorder, **options)


def random_ids(length=11, rows=2):
    return torch.randint(VOCAB, (rows, length))


def backward(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def assert_same_gradients(plain, graphed):
    compared = 0
    for (name, want), (_, got) in zip(plain.named_parameters(), graphed.named_parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-7, msg=name)
            compared += 1
    assert compared > 6


def train(plain, graphed, *lengths):
    """A pass of each length through both, after which losses and gradients are equal; gradients accumulate."""
    for length in lengths:
        ids = random_ids(length)
        torch.testing.assert_close(backward(graphed, ids), backward(plain, ids))
        assert_same_gradients(plain, graphed)


@pytest.mark.parametrize(
    "family, change",
    [
        pytest.param("qwen3", lambda m: m, id="full"),
        pytest.param("qwen3", checkpointed, id="checkpointing", marks=pytest.mark.slow),
        pytest.param("qwen3", lora, id="lora", marks=pytest.mark.slow),
        pytest.param("gemma3", lambda m: m, id="gemma3"),
        pytest.param("gpt2", lambda m: m, id="gpt2", marks=pytest.mark.slow),
        pytest.param("llama_tied", lambda m: checkpointed(lora(m)), id="lora, checkpointing"),
    ],
)
def test_losses_and_gradients_are_those_without_graphs(family, change):
    plain, graphed, layers = pair(change, family)
    for step in range(6):
        train(plain, graphed, *[7 if step == 4 else 11] * 2)
        if step % 2:
            for model in (plain, graphed):
                model.zero_grad(set_to_none=step == 1)
    assert RunsAgain.replays == 48  # of 12 micro-batches, two are noted and two are of another length
    assert layers.report == "CUDA graphs: 3 layers of the student, hidden states of 2x11x32"


def replaying(change=lambda model: model, **options):
    """A pair of models whose graphs are recorded."""
    plain, graphed, layers = pair(change, **options)
    train(plain, graphed, 11, 11, 11)
    assert RunsAgain.replays == 6
    for model in (plain, graphed):
        model.zero_grad()
    return plain, graphed, layers


def test_evaluations_run_as_they_are():
    plain, graphed, _ = replaying()
    ids = random_ids()
    with torch.no_grad():
        graphed(input_ids=ids)
        graphed.eval()
        torch.testing.assert_close(graphed(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
        graphed.generate(ids, max_new_tokens=2, do_sample=False, use_cache=True)
    assert RunsAgain.replays == 6
    plain.train(), graphed.train()
    train(plain, graphed, 11)
    assert RunsAgain.replays == 12


def test_a_second_forward_before_the_backward_runs_as_it_is():
    plain, graphed, _ = replaying()
    batches = random_ids(), random_ids()
    for model in (plain, graphed):
        first, second = (model(input_ids=ids, labels=ids).loss for ids in batches)
        (first * second).backward()
    assert RunsAgain.replays == 12
    assert_same_gradients(plain, graphed)


def test_a_loss_that_is_thrown_away_holds_nothing_up():
    plain, graphed, _ = replaying()
    ids = random_ids()
    for model in (plain, graphed):
        model(input_ids=random_ids(), labels=ids)
        backward(model, ids)
    assert RunsAgain.replays == 15
    assert_same_gradients(plain, graphed)


def test_a_second_backward_is_an_error():
    _, graphed, _ = replaying()
    ids = random_ids()
    loss = graphed(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Set cuda_graphs to never"):
        loss.backward()


def test_weights_that_move_are_recorded_again():
    plain, graphed, _ = replaying()
    for model in (plain, graphed):
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data * 1.5
    train(plain, graphed, 11, 11, 11)
    assert RunsAgain.replays == 12


def test_a_frozen_model_without_gradients():
    plain, graphed, _ = pair(lambda model: model.requires_grad_(False), trained=False, name="teacher")
    for model in (plain, graphed):
        model.eval()
    for _ in range(4):
        ids = random_ids()
        with torch.no_grad():
            torch.testing.assert_close(graphed(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert RunsAgain.replays == 6


def test_hooks_within_a_layer_end_it(capsys):
    plain, graphed, layers = replaying()
    seen = []
    for model in (plain, graphed):
        model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(1))
    train(plain, graphed, 11)
    assert len(seen) == 2 and RunsAgain.replays == 6
    assert layers.report == "CUDA graphs: none for the student: a Qwen3MLP has hooks"
    assert layers.report in capsys.readouterr().out


def test_always_is_an_error_where_layers_cannot_be_recorded():
    _, graphed, _ = pair(lambda model: checkpointed(lora(model, dropout=0.1)), always=True)
    ids = random_ids()
    backward(graphed, ids), backward(graphed, ids)
    with pytest.raises(ConfigError, match=r"cuda_graphs: always .* gradient checkpointing .* dropout masks"):
        backward(graphed, ids)


@pytest.mark.parametrize("limit, replays", [(1e12, 6), (1.0, 0)])
def test_auto_records_small_layers(monkeypatch, limit, replays):
    monkeypatch.setattr(cuda_graphs, "HOST_BOUND", limit)
    _, graphed, _ = pair()
    for _ in range(3):
        backward(graphed, random_ids())
    assert RunsAgain.replays == replays


def test_only_a_few_shapes_are_recorded(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SHAPES", 2)
    plain, graphed, layers = pair()
    train(plain, graphed, *[5, 6, 7] * 4)
    assert layers.report.endswith("2x5x32, 2x6x32")


def test_shapes_that_do_not_come_again_are_said(capsys):
    _, graphed, layers = pair()
    for length in (5, 6, 7, 5, 6, 7):
        backward(graphed, random_ids(length))
    layers.undo()
    assert layers.report == "CUDA graphs: none for the student: of 3 shapes, none came 3 times"
    assert layers.report in capsys.readouterr().out


class NoRoom(RunsAgain):
    def has_room(self):
        return False


class Full(RunsAgain):
    """Memory ends while backward is recorded."""

    recorded = 0

    def record(self, function):
        type(self).recorded += 1
        if type(self).recorded == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().record(function)


class Odd(RunsAgain):
    """Layers cannot run a second time."""

    def rehearsing(self):
        raise TypeError("odd\nand more")


@pytest.mark.parametrize(
    "recorder, reason",
    [(NoRoom, "the GPU may lack the memory for them"), (Full, "the GPU lacks the memory for them"), (Odd, "odd")],
)
def test_layers_that_cannot_be_recorded_run_as_they_are(recorder, reason):
    plain, graphed, layers = pair(recorder=recorder)
    train(plain, graphed, 11, 11, 11, 11)
    assert layers.report == f"CUDA graphs: none for the student: {reason}"


def test_undo_and_copies():
    plain, graphed, layers = replaying()
    other = copy.deepcopy(graphed)
    train(plain, other, 11)
    layers.undo()
    plain.zero_grad()
    train(plain, graphed, 11)
    assert RunsAgain.replays == 6
    assert not any("forward" in vars(layer) for layer in graphed.model.layers)


def test_what_stands_against_it():
    with pytest.raises(NotCapturable, match="its weights are on cpu"):
        GraphedLayers(tiny_model())
    model = tiny_model()
    model.model.layers[0].forward = lambda *args: None
    with pytest.raises(NotCapturable, match="forward of a LlamaDecoderLayer has been replaced"):
        GraphedLayers(model, recorder=RunsAgain)
    model = tiny_model()
    model.model.layers = torch.nn.ModuleList([model.model.layers[0]])
    with pytest.raises(NotCapturable, match="Expected one list of 2 decoder layers"):
        GraphedLayers(model, recorder=RunsAgain)


def packed_batch(tokens=24, longest=12):
    """Documents of random lengths, laid end to end by TRL's collator and filled up."""
    first = int(torch.randint(2, longest, ()))
    second = int(torch.randint(tokens - first - longest + 1, min(longest, tokens - first - 1), ()))
    lengths = [n for n in (first, second, tokens - first - second - 1) if n > 0]
    rows = [{"input_ids": torch.randint(1, VOCAB, (n,)).tolist()} for n in lengths]
    plain = with_lengths(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    batch = FixedShapes(plain, tokens, longest, pad_token_id=0)(rows)
    assert batch.pop("padding_tokens") == tokens - sum(lengths)
    return batch


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_packed_rows_replay_whatever_their_documents(family):
    plain, graphed, _ = pair(family=family)
    for model in (plain, graphed):
        patched_record(model).pack_attention()
    for _ in range(6):
        batch = packed_batch()
        losses = [model(**batch, use_cache=False).loss for model in (plain, graphed)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        assert_same_gradients(plain, graphed)
    assert RunsAgain.replays == 24


# what changes between the recording and a replay


def only_last_trains(model):
    model.requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    return model


def slow_case(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "before, after",
    [([11] * 1, [11] * 5), slow_case([11] * 2, [11] * 5), ([11] * 3, [11] * 5), slow_case([11] * 4, [11] * 5),
     ([11, 11, 11, 7, 7], [7, 11, 11, 11, 7])],  # one shape is recorded, the other is noted
)  # fmt: skip
def test_layers_that_are_unfrozen_get_gradients(before, after):
    """No graph stays from before."""
    plain, graphed, _ = pair(only_last_trains)
    train(plain, graphed, *before)
    plain.model.layers.requires_grad_(True), graphed.model.layers.requires_grad_(True)
    train(plain, graphed, *after)
    assert RunsAgain.replays > 6


def scale(layer):
    layer.scaling["default"] = 3.0


def drop_out(layer):
    layer.lora_dropout["default"].p = 0.5


@pytest.mark.parametrize("change", [scale, drop_out, lambda layer: layer.merge()], ids=["scale", "dropout", "merged"])
def test_adapters_that_change_are_recorded_again(change):
    _, graphed, layers = pair(lambda model: lora(model, dropout=0.1))
    for number, want in enumerate((0, 0, 6, 6, 6, 12)):  # noted twice, and then recorded
        if number == 3:
            change(graphed.base_model.model.model.layers[1].mlp.up_proj)
        backward(graphed, random_ids())
        assert RunsAgain.replays == want
    assert layers.report.endswith("2x11x32, 2x11x32")


class WithOffset(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.offset = base.requires_grad_(False), torch.nn.Parameter(torch.zeros(base.out_features))

    def forward(self, x):
        return self.base(x) + self.offset


def test_weights_that_are_added_are_recorded_too():
    plain, graphed, _ = replaying()
    for model in (plain, graphed):
        model.model.layers[1].self_attn.o_proj = WithOffset(model.model.layers[1].self_attn.o_proj)
    before = RunsAgain.replays
    train(plain, graphed, 11, 11, 11)
    plain.zero_grad(), graphed.zero_grad()  # after which the gradients of replays accumulate
    train(plain, graphed, 11, 11, 11)
    assert RunsAgain.replays == before + 24


def test_gradients_that_leave_the_layers_have_memory_of_their_own():
    plain, graphed, _ = pair()
    embedded = [torch.nn.Parameter(torch.ones(22, 32)) for _ in range(2)]
    for number in range(6):
        ids = random_ids()
        for model, inputs in zip((plain, graphed), embedded, strict=True):
            if number == 3:  # after which the gradients of replays accumulate
                inputs.grad = None
            model(inputs_embeds=inputs.view(2, 11, 32), labels=ids).loss.backward()
        torch.testing.assert_close(embedded[1].grad, embedded[0].grad, rtol=1e-5, atol=1e-7)
    assert RunsAgain.replays == 24


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m, id="full", marks=pytest.mark.slow),
        pytest.param(lora, id="lora", marks=pytest.mark.slow),
        pytest.param(checkpointed, id="checkpointing"),
    ],
)
@pytest.mark.parametrize("as_views", [pytest.param(False, marks=pytest.mark.slow), True])
def test_distributed_data_parallel(change, as_views, one_rank):
    plain, graphed, _ = pair(change)
    wrapped = [DistributedDataParallel(m, gradient_as_bucket_view=as_views) for m in (plain, graphed)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in wrapped]
    for _ in range(4):
        batches = [random_ids() for _ in range(3)]
        for model in wrapped:
            model.zero_grad()
            for ids in batches:
                with contextlib.nullcontext() if ids is batches[-1] else model.no_sync():
                    backward(model, ids)
        assert_same_gradients(plain, graphed)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(list(graphed.parameters()), list(plain.parameters()), rtol=1e-4, atol=1e-5)
    assert RunsAgain.replays == 60


def with_buckets(monkeypatch, change):
    """A pair of models, the second also as DDP wraps it, with places in DDP's buckets."""
    buckets, reduce = GradientBuckets(), dist.all_reduce
    # gloo has no average; of one rank it is the sum
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group, async_op: reduce(x, group=group, async_op=async_op))
    plain, graphed, _ = pair(change, places=buckets.places)
    wrapped = DistributedDataParallel(graphed, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    wrapped.register_comm_hook(dist.group.WORLD, buckets.average)
    return plain, graphed, wrapped, buckets


@pytest.mark.parametrize("change", [lambda m: m, lora, checkpointed], ids=["full", "lora", "checkpointing"])
def test_graphs_write_gradients_into_the_buckets_of_ddp(monkeypatch, one_rank, change):
    plain, graphed, wrapped, buckets = with_buckets(monkeypatch, change)
    computed_at = defaultdict(list)
    for step in range(6):
        if step == 3:
            for weight in filter(lambda w: w.requires_grad, graphed.parameters()):
                weight.register_post_accumulate_grad_hook(lambda w: computed_at[w].append(w.grad.data_ptr()))
        batches = [random_ids() for _ in range(1 + (step == 5))]
        for ids in batches:
            backward(plain, ids)
            with contextlib.nullcontext() if ids is batches[-1] else wrapped.no_sync():
                backward(wrapped, ids)
        assert_same_gradients(plain, graphed)
        for model in (plain, wrapped):
            model.zero_grad()
    places = {weight: place.data_ptr() for weight, place in buckets.places().items()}
    in_layers = [w for n, w in graphed.named_parameters() if "layers." in n and w.requires_grad]
    # a replay leaves a gradient in its bucket before DDP looks for it, but where earlier ones are added up elsewhere
    assert in_layers and all(computed_at[w][:3] == [places[w]] * 3 != computed_at[w][1:] for w in in_layers)


def sharing(model):
    """Two layers have one weight; in one of them, a weight is used twice."""
    first, _, last = model.model.layers
    last.mlp.down_proj.weight = first.mlp.down_proj.weight
    last.self_attn.v_proj.weight = last.self_attn.k_proj.weight
    return model


def test_a_shared_weight_gets_all_its_gradients_in_the_buckets(monkeypatch, one_rank):
    plain, graphed, wrapped, buckets = with_buckets(monkeypatch, sharing)
    for _ in range(4):
        ids = random_ids()
        backward(plain, ids)
        backward(wrapped, ids)
        assert_same_gradients(plain, graphed)
        for model in (plain, wrapped):
            model.zero_grad()
    assert RunsAgain.replays and buckets.places()


def test_a_second_training_finds_the_places_of_the_first(monkeypatch, one_rank):
    reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group, async_op: reduce(x, group=group, async_op=async_op))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(ddp_handler=DistributedDataParallelKwargs()), callbacks=[],
        args=SimpleNamespace(world_size=2, device=torch.device("cuda"), ddp_find_unused_parameters=True),
    )  # fmt: skip
    trainer.add_callback, trainer.remove_callback = trainer.callbacks.append, trainer.callbacks.remove

    def known(buckets):
        """Begin a training; return whether places are known before each of three backwards."""
        buckets.on_train_begin(None, None, None)
        found = []
        for _ in range(3):
            found.append(bool(buckets.places()))
            backward(trainer.model_wrapped, random_ids())
        return found

    trainer.model_wrapped = tiny_model()
    first = spare_copies_of_gradients(trainer, Replacements())
    trainer.model_wrapped = DistributedDataParallel(tiny_model(), gradient_as_bucket_view=True)
    assert known(first) == [False, False, True]  # DDP moves its buckets after the first
    first.leave()
    second = spare_copies_of_gradients(trainer, Replacements())
    assert known(second) == [False, True, True]
    trainer.model_wrapped = DistributedDataParallel(tiny_model(), gradient_as_bucket_view=True)
    assert known(second) == [False, False, True]  # as where auto_find_batch_size wraps the model again
    assert trainer.callbacks == [second]
    second.leave()
    assert not trainer.callbacks and not second.places()


def test_checkpointed_layers_in_graphs_lose_no_bit():
    losses = []
    for _ in range(4):
        plain, graphed, layers = pair(lambda model: checkpointed(model.bfloat16()), "llama", always=True)
        ids = random_ids()
        losses.append((backward(plain, ids).item(), [backward(graphed, ids).item() for _ in range(4)]))
    assert all(graphed == [one] * 4 for one, graphed in losses)


class Counts(RunsAgain):
    """Counts the hidden states and their gradients that graphs keep as they are recorded, which do not replay."""

    def __init__(self, device):
        super().__init__(device)
        self.kept, self.most = [], 0

    def record(self, function):
        tensors = [tensor.clone() for tensor in function()]
        self.kept += [weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor.dim() == 3]
        self.most = max(self.most, sum(kept() is not None for kept in self.kept))
        return tensors, lambda: None

    def unowned(self, tensor):
        return tensor.clone()


def test_recomputed_layers_have_two_gradients_between_them_at_a_time():
    """Each layer keeps what it got; of the gradients only the one that is read and the one that is computed."""
    recorders = []

    def recorder(device):
        recorders.append(Counts(device))
        return recorders[-1]

    recorder.device_type = "cpu"
    model = checkpointed(lora(tiny_model("llama", num_hidden_layers=6))).train()
    patch(model)
    model.enable_input_require_grads()
    GraphedLayers(base_of(model), recorder=recorder, always=True)
    for ids in [random_ids()] * 3:
        backward(model, ids)
    assert [recorder.most for recorder in recorders] == [6 + 2]


# What layers may do with what they are called with, and still replay as they run.


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.others = torch.nn.Linear(4, 4), []

    def forward(self, x, scale):
        return self.linear(x) * scale


class Chain(torch.nn.Module):
    """Layers that are called as `walk(layers, x, number of the pass)` says."""

    def __init__(self, layer, walk):
        super().__init__()
        self.layers, self.walk = torch.nn.ModuleList(layer() for _ in range(3)), walk
        self.config, self.number = LlamaConfig(num_hidden_layers=3), 0

    def forward(self, x):
        self.number += 1
        return self.walk(self.layers, x, self.number)


def by_half(layers, x, number):
    for layer in layers:
        x = layer(x, 0.5)
    return x


def compare_chains(layer, walk=by_half, change=lambda chain: None, passes=5):
    """Train a chain as it is and one in graphs: values and gradients are equal. Returns what is reported."""
    chains = []
    for _ in range(2):
        torch.manual_seed(0)
        chains.append(Chain(layer, walk).train())
        change(chains[-1])
    layers = GraphedLayers(chains[1], recorder=RunsAgain)
    for _ in range(passes):
        x = torch.randn(2, 5, 4)
        values = [chain(x) for chain in chains]
        torch.testing.assert_close(values[1], values[0])
        for value in values:
            value.float().square().sum().backward()
        for want, got in zip(*(chain.parameters() for chain in chains), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    return layers.report


@pytest.mark.parametrize("other", [torch.add, lambda one, index: one.mT.contiguous().mT], ids=["value", "strides"])
def test_one_tensor_for_all_layers_may_become_several(other):
    def walk(layers, x, number):
        one = x.square()
        for index, layer in enumerate(layers):
            x = layer(x, one if number < 5 else other(one, index))
        return x

    compare_chains(Scaled, walk, passes=7)
    assert RunsAgain.replays >= 6


class Writes(Scaled):
    def forward(self, x, shared):
        shared.setdefault("first", x.square())
        return super().forward(x, shared["first"])


class Returns(Scaled):
    def forward(self, x, scale):
        return self.linear(x), object()


class Leaps(Scaled):
    """Leaves a part out at random, as LoKr's module_dropout does."""

    def forward(self, x, scale):
        random.seed(int(x.detach().abs().sum() * 1000))
        return super().forward(x, scale if random.random() < 0.5 else 1.0)


class ComputesWith(Scaled):
    """Computes with a weight that another module holds."""

    def forward(self, x, scale):
        return super().forward(x, scale) * self.others[0]


def into_one(layers, x, number):
    shared = {}
    for layer in layers:
        x = layer(x, shared)
    return x


def first_of(layers, x, number):
    for layer in layers:
        x, _ = layer(x, 1.0)
    return x


def with_weight(chain, checkpointing=False):
    chain.scale = torch.nn.Parameter(torch.ones(4))
    for layer in chain.layers:
        layer.others.append(chain.scale)
        layer.gradient_checkpointing = checkpointing


@pytest.mark.parametrize(
    ("layer", "walk", "change", "reason"),
    [
        (Writes, into_one, lambda chain: None, "a layer writes into its arguments"),
        (Returns, first_of, lambda chain: None, "a layer gets a object"),
        (Leaps, by_half, lambda chain: None, "a layer draws random numbers on the host"),
        (ComputesWith, by_half, with_weight, "a layer computes with weights that are not its own"),
        (ComputesWith, by_half, lambda chain: with_weight(chain, True), "with weights that are not its own"),
    ],
    ids=["writes", "returns", "draws", "others' weights", "others' weights, checkpointing"],
)
def test_layers_that_do_more_run_as_they_are(layer, walk, change, reason):
    report = compare_chains(layer, walk, change)
    assert report.startswith("CUDA graphs: none for the student: ") and report.endswith(reason)


class Looks(torch.autograd.Function):
    """Looks whether autocast is on in its backward."""

    seen = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Looks.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient


class InFp32(Scaled):
    """Computes in fp32 within autocast, as routers do."""

    def forward(self, x, scale):
        with torch.autocast("cpu", enabled=False):
            return super().forward(Looks.apply(x.float()), scale)


def test_backward_is_recorded_without_autocast():
    def walk(layers, x, number):
        with torch.autocast("cpu", torch.bfloat16):
            return by_half(layers, x, number)

    compare_chains(InFp32, walk)
    assert RunsAgain.replays == 18
    assert Looks.seen and not any(Looks.seen)


def test_replays_on_another_stream_wait_for_those_before(monkeypatch):
    waits: list[tuple[str, str]] = []

    class Stream(str):
        def wait_stream(self, other):
            waits.append((str(self), str(other)))

    streams = iter(map(Stream, "aabbac"))
    cuda = SimpleNamespace(
        Stream=lambda device: None, graph_pool_handle=lambda: None, current_stream=lambda device: next(streams)
    )
    monkeypatch.setattr(graph_recorder, "torch", SimpleNamespace(cuda=cuda))
    recorder = graph_recorder.CudaRecorder(torch.device("cpu"))
    for _ in range(6):
        recorder.take_turn()
    assert waits == [("b", "a"), ("a", "b"), ("c", "a")]
