"""Files as other tools write what a teacher predicts: vLLM's prompt log-probabilities, DistillKit's captures."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from served import Served


def output_of(model, ids, k) -> dict:
    """Return what vLLM's `LLM.generate` does for a prompt, its `RequestOutput` as JSON."""
    places = Served(model).answer({"prompt": ids, "prompt_logprobs": k, "model": "m"})["choices"][0]["prompt_logprobs"]
    for place in places[1:]:
        ranked = sorted(place, key=lambda token: -place[token]["logprob"])
        for rank, token in enumerate(ranked, 1):
            # the token itself has its rank among all; 99 stands for what is beyond the list
            place[token].update(rank=rank if rank <= k else 99, decoded_token=f"w{token}")
    return {"request_id": "0", "prompt": None, "prompt_token_ids": list(ids), "prompt_logprobs": places}


def answer_of(output: dict) -> dict:
    """Return the same as an answer of `/v1/completions`."""
    choice = {"index": 0, "text": "a", **{name: output[name] for name in ("prompt_logprobs", "prompt_token_ids")}}
    return {"id": "cmpl-1", "object": "text_completion", "model": "teacher-7b", "choices": [choice]}


def framed(answer: dict) -> dict:
    """Return an answer as a batch run writes it."""
    return {"id": "vllm-1", "custom_id": "r1", "response": {"status_code": 200, "body": answer}, "error": None}


def write_lines(file: Path, rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_vllm_parquet(file: Path, outputs, form: str) -> Path:
    """`form`: "text", JSON in a column; "map", a dictionary of Arrow; "struct", what pandas makes of it."""
    ids, listed = ([output[name] for output in outputs] for name in ("prompt_token_ids", "prompt_logprobs"))
    if form == "text":
        column = pa.array([json.dumps(row) for row in listed])
    elif form == "map":
        entry = pa.struct([("logprob", pa.float64()), ("rank", pa.int64()), ("decoded_token", pa.string())])
        rows = [[None if p is None else [(int(t), e) for t, e in p.items()] for p in row] for row in listed]
        column = pa.array(rows, pa.list_(pa.map_(pa.int64(), entry)))
    else:
        column = pa.array(listed)
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt_token_ids": ids, "prompt_logprobs": column}), file)
    return file


EXACT = {"d": 64, "k": 9, "exact_k": 9, "exact_dtype": "float32", "residual_bins": [], "delta_encoding": False}
LOSSY = {
    "d": 64, "k": 24, "exact_k": 5, "exact_dtype": "float32", "polynomial_terms": [0, 1, 2, "sqrt"],
    "term_dtype": "float32", "delta_encoding": False, "error_diffusion": False, "normalize_t": True,
    "residual_bins": [
        {"scale_dtype": "float16", "element_bits": 7, "num_elements": 6},
        {"scale_dtype": "bfloat16", "element_bits": 3, "num_elements": 5},
        {"scale_dtype": "float32", "element_bits": 1, "num_elements": 3},
    ],
}  # fmt: skip
DELTAS = {**LOSSY, "delta_encoding": True, "normalize_t": False, "exact_dtype": "bfloat16", "term_dtype": "float16"}


def bits_of(numbers, bits) -> list[int]:
    """Return integers as bytes, one after the other without gaps, the highest bit first."""
    text = "".join(format(int(number), f"0{bits}b") for number in numbers)
    text += "0" * (-len(text) % 8)
    return [int(text[at : at + 8], 2) for at in range(0, len(text), 8)]


def _raw(values, dtype) -> list[int]:
    return torch.as_tensor(values).to(getattr(torch, dtype)).view(torch.uint8).tolist()


def compressed(log_probs, how) -> tuple[list[int], np.ndarray]:
    """Return the bytes of the likeliest tokens' log-probabilities (k,), and the numbers that they stand for, fp64."""
    numbers = np.diff(log_probs, prepend=0.0) if how["delta_encoding"] else np.asarray(log_probs)
    exact = torch.tensor(numbers[: how["exact_k"]]).to(getattr(torch, how["exact_dtype"]))
    content, rest = exact.view(torch.uint8).tolist(), numbers[how["exact_k"] :]
    fit = np.zeros(len(rest))
    if how.get("polynomial_terms"):
        dtype = getattr(torch, how["term_dtype"])
        steps = (
            torch.linspace(0, 1, len(rest), dtype=dtype) if how["normalize_t"] else torch.arange(len(rest)).to(dtype)
        )
        terms = torch.stack(
            [steps**t if isinstance(t, int) else getattr(torch, t)(steps) for t in how["polynomial_terms"]], -1
        )
        coefficients = torch.tensor(np.linalg.lstsq(terms.double().numpy(), rest, rcond=None)[0]).to(dtype)
        content += _raw(coefficients, how["term_dtype"])
        fit = (terms * coefficients).sum(-1).double().numpy()
    at = 0
    for each in how["residual_bins"]:
        bits, part = each["element_bits"], slice(at, at + each["num_elements"])
        residual, most = rest[part] - fit[part], 1 if each["element_bits"] == 1 else 2 ** (each["element_bits"] - 1)
        scale = torch.tensor(np.abs(residual).max() / most).to(getattr(torch, each["scale_dtype"]))
        if bits == 1:
            codes, corrections = (residual > 0).astype(int), np.where(residual > 0, 1, -1)
        else:
            corrections = np.clip(np.round(residual / float(scale)), -most, most - 1)
            codes = corrections + most
        content += _raw(scale[None], each["scale_dtype"]) + bits_of(codes, bits)
        fit[part] += corrections * float(scale)
        at += each["num_elements"]
    made = np.concatenate([exact.double().numpy(), fit])
    return content, made.cumsum() if how["delta_encoding"] else made


def distillkit_row(model, ids, how) -> dict:
    """Return a row of `sample_logits_vllm`: what follows every token but the last."""
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    values, tokens = log_p.topk(how["k"], -1)
    bits = int(np.ceil(np.log2(how["d"])))
    return {
        "input_ids": list(ids),
        "compressed_logprobs": [compressed(row.numpy(), how)[0] for row in values],
        "bytepacked_indices": [bits_of(row, bits) for row in tokens.tolist()],
    }


def write_distillkit(folder: Path, rows, how) -> Path:
    """Write files of three rows, as its writer starts a new one after some."""
    folder.mkdir(parents=True, exist_ok=True)
    lists = pa.list_(pa.list_(pa.uint8()))
    schema = pa.schema({"input_ids": pa.list_(pa.uint64()), "compressed_logprobs": lists, "bytepacked_indices": lists})
    for number in range(0, len(rows), 3):
        table = pa.Table.from_pylist(rows[number : number + 3], schema=schema)
        pq.write_table(table, folder / f"data_{number // 3}.parquet")
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(how))
    return folder
