"""Decoder layers in graphs: without a GPU what is recorded runs again (RunsAgain), on one it is CUDA's graphs."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from recorders import RunsAgain
from tiny import VOCAB, tiny_model
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.patching.graphs import cuda_graphs
from liger_trainer.patching.graphs import layer_graphs as graph_recorder
from liger_trainer.patching.graphs.cuda_graphs import GraphedLayers
from liger_trainer.patching.graphs.layer_graphs import NotCapturable, fill, flatten
from liger_trainer.patching.patcher import base_of, patched_record
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
        ids = random_ids(7 if step == 4 else 11)
        for _ in range(2):  # gradients accumulate
            torch.testing.assert_close(backward(graphed, ids), backward(plain, ids))
        assert_same_gradients(plain, graphed)
        if step % 2:
            for model in (plain, graphed):
                model.zero_grad(set_to_none=step == 1)
    assert RunsAgain.replays == 48  # of 12 micro-batches, two are noted and two are of another length
    assert layers.report == "CUDA graphs: 3 layers of the student, hidden states of 2x11x32"


def replaying(change=lambda model: model, **options):
    """A pair of models whose graphs are recorded."""
    plain, graphed, layers = pair(change, **options)
    for _ in range(3):
        ids = random_ids()
        backward(plain, ids), backward(graphed, ids)
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
    for model in (plain, graphed):
        backward(model.train(), ids)
    assert RunsAgain.replays == 12
    assert_same_gradients(plain, graphed)


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
    for _ in range(3):
        ids = random_ids()
        backward(plain, ids), backward(graphed, ids)
        assert_same_gradients(plain, graphed)
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
    ids = random_ids()
    backward(plain, ids), backward(graphed, ids)
    assert_same_gradients(plain, graphed)
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
    for _ in range(4):
        for length in (5, 6, 7):
            ids = random_ids(length)
            backward(plain, ids), backward(graphed, ids)
            assert_same_gradients(plain, graphed)
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


def test_layers_that_fail_in_the_rehearsal_run_as_they_are():
    plain, graphed, layers = pair(recorder=Odd)
    for _ in range(4):
        ids = random_ids()
        backward(plain, ids), backward(graphed, ids)
        assert_same_gradients(plain, graphed)
    assert layers.report == "CUDA graphs: none for the student: odd"


@pytest.mark.parametrize("recorder, reason", [(NoRoom, "may lack"), (Full, "lacks")])
def test_without_memory_for_graphs_layers_run_as_they_are(recorder, reason):
    plain, graphed, layers = pair(recorder=recorder)
    for _ in range(4):
        ids = random_ids()
        backward(plain, ids), backward(graphed, ids)
        assert_same_gradients(plain, graphed)
    assert layers.report == f"CUDA graphs: none for the student: the GPU {reason} the memory for them"


def test_undo_and_copies():
    plain, graphed, layers = replaying()
    other = copy.deepcopy(graphed)
    ids = random_ids()
    backward(plain, ids), backward(other, ids)
    assert_same_gradients(plain, other)
    layers.undo()
    plain.zero_grad()
    backward(plain, ids), backward(graphed, ids)
    assert_same_gradients(plain, graphed)
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


def test_structures():
    x, y = torch.ones(2, 3), torch.ones(4).requires_grad_()
    value = (x, [y, None, {"a": x, "b": 2}], "text", 1.5, torch.float32)
    tensors = []
    structure = flatten(value, tensors)
    assert [id(t) for t in tensors] == [id(x), id(y), id(x)]
    assert fill(structure, iter(tensors)) == value
    assert structure == flatten((torch.zeros(2, 3), [y, None, {"a": x, "b": 2}], "text", 1.5, torch.float32), [])
    assert structure != flatten((x.T, *value[1:]), [])
    with pytest.raises(NotCapturable, match="a layer gets a object"):
        flatten([object()], [])


def packed_batch(tokens=24, longest=12):
    """Documents of random lengths, laid end to end by TRL's collator and filled up."""
    first = int(torch.randint(2, longest, ()))
    second = int(torch.randint(tokens - first - longest + 1, min(longest, tokens - first - 1), ()))
    lengths = [n for n in (first, second, tokens - first - second - 1) if n > 0]
    rows = [{"input_ids": torch.randint(1, VOCAB, (n,)).tolist()} for n in lengths]
    plain = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
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


def test_no_graph_stays_from_before_a_change():
    plain, graphed, _ = pair(only_last_trains)
    for number, length in enumerate((11, 11, 11, 7, 7, 7, 11, 11, 11, 7)):
        if number == 5:  # one shape is recorded, the other is noted
            plain.model.layers.requires_grad_(True), graphed.model.layers.requires_grad_(True)
        ids = random_ids(length)
        backward(plain, ids), backward(graphed, ids)
        assert_same_gradients(plain, graphed)


@pytest.mark.parametrize(
    "passes", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_layers_that_are_unfrozen_get_gradients(passes):
    plain, graphed, _ = pair(only_last_trains)
    for number in range(passes + 5):
        if number == passes:
            plain.model.layers.requires_grad_(True), graphed.model.layers.requires_grad_(True)
        ids = random_ids()
        backward(plain, ids), backward(graphed, ids)
        assert_same_gradients(plain, graphed)
    assert RunsAgain.replays > 6


def scale(layer):
    layer.scaling["default"] = 3.0


def drop_out(layer):
    layer.lora_dropout["default"].p = 0.5


@pytest.mark.parametrize("change", [scale, drop_out, lambda layer: layer.merge()], ids=["scale", "dropout", "merged"])
def test_adapters_that_change_are_recorded_again(change):
    _, graphed, layers = replaying(lambda model: lora(model, dropout=0.1))
    change(graphed.base_model.model.model.layers[1].mlp.up_proj)
    for want in (6, 6, 12):  # noted twice, and then recorded
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
    for number in range(6):
        ids = random_ids()
        if number == 3:  # after which the gradients of replays accumulate
            plain.zero_grad(), graphed.zero_grad()
        backward(plain, ids), backward(graphed, ids)
        assert_same_gradients(plain, graphed)
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


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m, id="full", marks=pytest.mark.slow),
        pytest.param(lora, id="lora", marks=pytest.mark.slow),
        pytest.param(checkpointed, id="checkpointing"),
    ],
)
@pytest.mark.parametrize("as_views", [pytest.param(False, marks=pytest.mark.slow), True])
def test_distributed_data_parallel(change, as_views):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
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
        for want, got in zip(plain.parameters(), graphed.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert RunsAgain.replays == 60
    finally:
        dist.destroy_process_group()


def test_checkpointed_layers_in_graphs_lose_no_bit():
    losses = []
    for _ in range(4):
        plain, graphed, layers = pair(lambda model: checkpointed(model.bfloat16()), "llama", always=True)
        ids = random_ids()
        losses.append((backward(plain, ids).item(), [backward(graphed, ids).item() for _ in range(4)]))
    assert all(graphed == [one] * 4 for one, graphed in losses)


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
