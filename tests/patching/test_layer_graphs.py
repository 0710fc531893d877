"""What layers may do with what they are called with, and still replay as they run."""

import copy
import random

import pytest
import torch
from recorders import RunsAgain
from transformers import LlamaConfig

from liger_trainer.patching.graphs.cuda_graphs import GraphedLayers


@pytest.fixture(autouse=True)
def count_replays(monkeypatch):
    monkeypatch.setattr(RunsAgain, "replays", 0)


class Chain(torch.nn.Module):
    """Layers that are called as `walk(layers, x)` says."""

    def __init__(self, layer, walk):
        super().__init__()
        self.layers, self.walk = torch.nn.ModuleList(layer() for _ in range(3)), walk
        self.config = LlamaConfig(num_hidden_layers=3)

    def forward(self, x):
        return self.walk(self.layers, x)


def compare_chains(layer, walk, inputs, passes=5, **options):
    torch.manual_seed(0)
    plain = Chain(layer, walk).train()
    graphed = copy.deepcopy(plain)
    layers = GraphedLayers(graphed, recorder=RunsAgain, **options)
    for number in range(passes):
        inputs(number)
        values = [model(inputs.x) for model in (plain, graphed)]
        torch.testing.assert_close(values[1], values[0])
        for value in values:
            value.float().square().sum().backward()
        for want, got in zip(plain.parameters(), graphed.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    return layers


class Inputs:
    def __call__(self, number):
        self.x, self.number = torch.randn(2, 5, 4), number


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.linear(x) * scale


def test_one_tensor_for_all_layers_may_become_several():
    inputs = Inputs()

    def walk(layers, x):
        one = x.square()
        for index, layer in enumerate(layers):
            x = layer(x, one if inputs.number < 4 else one + index)
        return x

    compare_chains(Scaled, walk, inputs, passes=7)
    assert RunsAgain.replays >= 6


class Shares(Scaled):
    def forward(self, x, shared):
        shared.setdefault("first", x.square())
        return super().forward(x, shared["first"])


def test_layers_that_write_into_their_arguments_run_as_they_are():
    def walk(layers, x):
        shared = {}
        for layer in layers:
            x = layer(x, shared)
        return x

    layers = compare_chains(Shares, walk, Inputs())
    assert layers.report == "CUDA graphs: none for the student: a layer writes into its arguments"


class Returns(Scaled):
    def forward(self, x, _):
        return self.linear(x), object()


def test_layers_that_return_something_else_run_as_they_are():
    def walk(layers, x):
        for layer in layers:
            x, _ = layer(x, 1.0)
        return x

    layers = compare_chains(Returns, walk, Inputs())
    assert layers.report == "CUDA graphs: none for the student: a layer gets a object"


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
    def walk(layers, x):
        with torch.autocast("cpu", torch.bfloat16):
            for layer in layers:
                x = layer(x, 0.5)
        return x

    compare_chains(InFp32, walk, Inputs())
    assert RunsAgain.replays == 18
    assert Looks.seen and not any(Looks.seen)


class ComputesWith(Scaled):
    """Computes with a weight that another module holds."""

    def __init__(self):
        super().__init__()
        self.others = []

    def forward(self, x, scale):
        return super().forward(x, scale) * self.others[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_of_others_get_their_gradients(checkpointing):
    torch.manual_seed(0)

    def walk(layers, x):
        for layer in layers:
            x = layer(x, 0.5)
        return x

    chains = []
    for _ in range(2):
        torch.manual_seed(0)
        chains.append(Chain(ComputesWith, walk).train())
        chains[-1].scale = torch.nn.Parameter(torch.ones(4))
        for layer in chains[-1].layers:
            layer.others.append(chains[-1].scale)
            layer.gradient_checkpointing = checkpointing
    layers = GraphedLayers(chains[1], recorder=RunsAgain)
    for _ in range(5):
        x = torch.randn(2, 5, 4)
        for chain in chains:
            chain(x).square().sum().backward()
        torch.testing.assert_close(chains[1].scale.grad, chains[0].scale.grad)
    assert layers.report.endswith("a layer computes with weights that are not its own")


class Leaps(Scaled):
    """Leaves a part out at random, as LoKr's module_dropout does."""

    def forward(self, x, scale):
        random.seed(int(x.detach().abs().sum() * 1000))
        return super().forward(x, scale if random.random() < 0.5 else 1.0)


def test_layers_that_draw_on_the_host_run_as_they_are():
    def walk(layers, x):
        for layer in layers:
            x = layer(x, 0.5)
        return x

    layers = compare_chains(Leaps, walk, Inputs())
    assert layers.report.endswith("a layer draws random numbers on the host")
