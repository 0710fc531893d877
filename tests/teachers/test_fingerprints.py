"""Fingerprints of rows and of weights: the same content gives the same one, any change another."""

import torch
from datasets import Dataset, concatenate_datasets

from liger_trainer.teachers.fingerprints import rows_fingerprint, sampled_fingerprint


def test_rows_are_known_by_their_content_and_order_however_they_lie(tmp_path):
    def rows(numbers):
        ids = [list(range(n, n + n % 7 + 1)) for n in numbers]
        return Dataset.from_dict({"input_ids": ids, "labels": ids, "text": [f"{n}" for n in numbers]})

    whole, want = rows(range(3000)), rows_fingerprint(rows(range(3000)))
    whole.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    same = {
        "indices": rows(range(2999, -1, -1)).select(range(2999, -1, -1)),
        "a slice": rows(range(-50, 3050)).select(range(50, 3050)),
        "chunks": concatenate_datasets([rows(range(i, i + 100)) for i in range(0, 3000, 100)]),
        "files": Dataset.load_from_disk(str(tmp_path / "saved")),
        "columns": whole.select_columns(["text", "labels", "input_ids"]),
    }
    assert {name: rows_fingerprint(dataset) for name, dataset in same.items()} == dict.fromkeys(same, want)
    other = {
        "reversed": whole.select(range(2999, -1, -1)),
        "two exchanged": whole.select([1, 0, *range(2, 3000)]),
        "fewer": whole.select(range(2999)),
        "a text": concatenate_datasets([whole.select(range(2999)), rows([2999]).map(lambda row: {"text": "x"})]),
        "no text": whole.remove_columns("text"),
        "a token": whole.map(lambda row, i: {"input_ids": [6] * 6} if i == 5 else {}, with_indices=True),
        "a null": whole.map(lambda row, i: {"labels": None} if i == 5 else {}, with_indices=True),
    }
    found = {rows_fingerprint(dataset) for dataset in other.values()}
    assert len(found) == len(other) and want not in found
    borders = [Dataset.from_dict({"input_ids": ids}) for ids in ([[1, 2], [3]], [[1], [2, 3]])]
    assert rows_fingerprint(borders[0]) != rows_fingerprint(borders[1])


def test_weights_are_known_in_every_dtype_and_not_where_they_are_not():
    weights = {"a": torch.randn(70, 64), "b": torch.randn(5), "count": torch.arange(9)}
    want = sampled_fingerprint(weights.items())
    assert want == sampled_fingerprint({**weights, "a": weights["a"].bfloat16()}.items())
    assert want == sampled_fingerprint({**weights, "a": weights["a"].T.contiguous().T}.items())
    tuned = weights["a"] * (1 + 1e-3 * torch.randn(70, 64))
    for name, other in (("a", tuned), ("a", weights["a"].view(64, 70)), ("b", -weights["b"]), ("c", torch.ones(1))):
        assert sampled_fingerprint({**weights, name: other}.items()) != want
    assert sampled_fingerprint([("a", torch.empty(3, device="meta"))]) is None
    assert sampled_fingerprint([("a", torch.empty(0))]) is sampled_fingerprint([]) is None  # ZeRO-3's; none at all


def test_a_large_weight_is_sampled_over_its_rows_and_columns():
    weight = torch.randn(4096, 1024)
    want = sampled_fingerprint([("a", weight)])
    for part in (weight[:64], weight[-64:], weight[:, :16], weight[:, -16:], weight[1::2], weight[:, 1::2]):
        part.neg_()
        assert sampled_fingerprint([("a", weight)]) != want
        part.neg_()
    assert sampled_fingerprint([("a", weight)]) == want


def test_weights_of_a_class_that_cannot_be_cut_are_not_known():
    class Packed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.flatten:
                raise NotImplementedError
            return super().__torch_function__(func, types, args, kwargs)

    assert sampled_fingerprint([("w", torch.ones(3, 2))]) is not None
    assert sampled_fingerprint([("w", torch.ones(3, 2).as_subclass(Packed))]) is None
