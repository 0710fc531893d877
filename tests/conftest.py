"""The tests' environment, set before triton and Hugging Face's libraries are imported: they read it once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels run on the CPU, in numpy
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, torch.get_num_threads()))  # the tests' tensors are too small for more
