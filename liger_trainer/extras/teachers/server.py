"""`teacher: server`: a model that runs elsewhere and tells its likeliest tokens."""

import functools
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ...errors import ConfigError
from ...losses.sparse_answer import SparseAnswer, TokenTargets
from ...secrets import remember_settings
from ...teachers.base import DistillHost, Teacher
from ...teachers.config import TeacherConfig
from ...teachers.row_keys import documents, row_key
from ...teachers.vocabulary import (
    Vocabulary,
    announce_other_template,
    check_student_vocabulary,
    compare_tokenizers,
    teacher_tokenizer,
)
from .connection import CompletionsServer, Question, ServerOptions, TopTokens, key_in

REMEMBERED = 256 * 2**20  # bytes of answers that are kept, because each evaluation asks for the same rows
PROBED = 8  # tokens of the question that is asked before training
SAME_MODEL = 0.1  # total variation, on average over its places: other kernels and formats are closer, other models not


class ServerTeacher(Teacher):
    """A server of `/v1/completions`, or several of one model; docs/teachers.md says what it must be able to do.

    Each document of a batch is one question, up to its last supervised token; the questions of a batch are asked
    together. The first 256 MiB of answers are kept and not asked for again; those about completions that are sampled in
    training, which do not come again, are not kept.

    Raises:
        ConfigError: the environment variable for the key is not set; later, tokens beyond the vocabulary, servers that
            answer as different models do, and what `CompletionsServer` refuses.
    """

    def __init__(self, args: TeacherConfig):
        assert args.teacher_server_base_url is not None and args.teacher_server_model is not None
        remember_settings("teacher_server_base_url", args.teacher_server_base_url)
        self.server = CompletionsServer(
            ServerOptions(
                url=args.teacher_server_base_url,
                model=args.teacher_server_model,
                protocol=args.teacher_server_protocol,
                top_k=args.teacher_server_top_k,
                timeout=args.teacher_server_timeout,
                retries=args.teacher_server_retries,
                concurrency=args.teacher_server_concurrency,
                api_key=key_in(args.teacher_server_api_key_env),
            )
        )
        self._tokenizer = args.teacher_tokenizer_name_or_path
        self._trust_remote_code = args.trust_remote_code
        self._vocabulary: Vocabulary | None = None
        self._known: dict[bytes, TopTokens] = {}
        self._samples, self._rows = bool(args.samples), set[bytes]()
        self._known_bytes = 0

    @functools.cached_property
    def _own_tokenizer(self) -> Any:
        """Return the teacher's where the configuration names it, since a server does not tell its own; else None."""
        named = self._tokenizer
        return teacher_tokenizer(None, named, trust_remote_code=self._trust_remote_code) if named else None

    def see(self, dataset: Any, tokenizer: Any, name: str) -> None:
        if name == "train":
            announce_other_template(dataset, tokenizer, self._own_tokenizer, "the teacher's server")

    def check(self, dataset: Any, name: str, tokenizer: Any) -> None:
        """Ask every server about the first tokens of the dataset, so that a faulty one shows before training."""
        self._shared(tokenizer).check_rows(dataset, name)
        rows = documents(dataset) if isinstance(dataset, Dataset) else iter(())
        # the first token of a row is predicted by nothing, so one token is no question
        first = next((row for row in rows if len(row.input_ids) > 1), None)
        if self._samples and isinstance(dataset, Dataset):
            # these come again each epoch; sampled completions do not, and would fill the memory
            self._rows.update(row.key for row in documents(dataset))
        if first is not None:
            ids = first.input_ids[:PROBED].tolist()
            answers = self.server.ask_each(Question(ids, list(range(1, len(ids)))))
            for answer in answers.values():
                self._check_ids(answer)
            _check_alike(answers)

    def fingerprints(self) -> dict[str, Any]:
        """A server tells nothing but its model's name."""
        return {"model": self.server.options.model}

    def prepare(self, trainer: DistillHost) -> int:
        size = self._shared(trainer.tokenizer).size
        if self.server.options.top_k > size:
            raise ConfigError(f"teacher_server_top_k is {self.server.options.top_k}, and there are {size} tokens.")
        self.unshared = self._shared(trainer.tokenizer).unshared
        return check_student_vocabulary(trainer.student, size)

    def _shared(self, tokenizer: Any) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = compare_tokenizers(tokenizer, self._own_tokenizer)
        return self._vocabulary

    @property
    def _vocab_size(self) -> int:
        assert self._vocabulary is not None
        return self._vocabulary.size

    def answer(self, inputs: dict[str, Any]) -> SparseAnswer:
        ids = inputs["input_ids"]
        stretches = _documents(inputs)
        answers = self._ask([list(row) for _, *row in stretches])
        shape, k = ids.shape, self.server.options.top_k
        # On the CPU, where the answers are, and then to the device at once. -1: no entry.
        tokens = torch.full((*shape, k), -1, dtype=torch.int32)
        log_probs = torch.full((*shape, k), -torch.inf)
        labels = torch.zeros(shape)
        for ((row, at), _, supervised), answer in zip(stretches, answers, strict=True):
            places = at[np.flatnonzero(supervised[1:] != -100)]  # the positions that predict supervised tokens
            tokens[row, places] = torch.from_numpy(answer.ids)
            log_probs[row, places] = torch.from_numpy(answer.log_probs)
            labels[row, places] = torch.from_numpy(answer.label_log_prob)
        tokens, log_probs, labels = (x.to(ids.device) for x in (tokens, log_probs, labels))
        top = tokens[..., 0].clamp(min=0)
        targets = TokenTargets(tokens, log_probs, top, labels, entropy=None, unnamed=torch.zeros_like(labels))
        return SparseAnswer(targets, "bucket", self._vocab_size)

    def _ask(self, rows: list[list[np.ndarray]]) -> list[TopTokens]:
        keys = [row_key(ids, labels) for ids, labels in rows]
        new: dict[bytes, Question] = {}
        for key, (ids, labels) in zip(keys, rows, strict=True):
            if key not in self._known:  # about the supervised tokens, with a prompt that ends at the last of them
                places = (np.flatnonzero(labels[1:] != -100) + 1).tolist()
                new[key] = Question(ids[: places[-1] + 1].tolist(), places)
        answers = dict(zip(new, self.server.ask(list(new.values())), strict=True))
        for key, answer in answers.items():
            self._check_ids(answer)
            size = sum(part.nbytes for part in answer)
            comes_again = not self._samples or key in self._rows
            if comes_again and self._known_bytes + size <= REMEMBERED:
                self._known[key], self._known_bytes = answer, self._known_bytes + size
        return [answers[key] if key in answers else self._known[key] for key in keys]

    def _check_ids(self, answer: TopTokens) -> None:
        if answer.ids.size and (answer.ids.max() >= self._vocab_size or answer.ids.min() < 0):
            beyond = answer.ids[(answer.ids >= self._vocab_size) | (answer.ids < 0)][0]
            raise ConfigError(
                f"The teacher's server {self.server.endpoint} names token {beyond}, and the student's tokenizer has "
                f"{self._vocab_size}: they do not share a vocabulary. Serve a model with the same tokenizer."
            )


def _check_alike(answers: dict[str, TopTokens]) -> None:
    """Raise ConfigError where servers give different answers to one question."""
    (first, mine), *others = answers.items()
    for name, theirs in others:
        apart = float(np.mean([_total_variation(*places) for places in zip(*mine[:2], *theirs[:2], strict=True)]))
        if not apart <= SAME_MODEL:
            raise ConfigError(
                f"teacher_server_base_url: {first} and {name} serve different models: asked about the first tokens of "
                f"the data, their probabilities differ by {apart:.2f} (total variation; {SAME_MODEL} at most). Several "
                "servers must serve one model; for several models, use teachers in this process."
            )


def _total_variation(ids: np.ndarray, log_probs: np.ndarray, other_ids: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation of two lists of likely tokens, each with the rest as one more."""
    p, q = (dict(zip(i.tolist(), np.exp(x).tolist(), strict=True)) for i, x in ((ids, log_probs), (other_ids, other)))
    both = p.keys() & q.keys()
    # Tokens that only one list has count to the rest of both, whose share is known: a lower bound of the distance.
    lumped = [(p[token], q[token]) for token in both]
    lumped.append((1 - sum(p[token] for token in both), 1 - sum(q[token] for token in both)))
    return sum(abs(a - b) for a, b in lumped) / 2


def _documents(inputs: dict[str, Any]) -> list[tuple[tuple[int, np.ndarray], np.ndarray, np.ndarray]]:
    """Return ((row, positions), token ids, labels) of each document in a batch that has something to predict.

    In a padding-free row, position_ids start again at 0 with each document.
    """
    ids, labels = (inputs[name].cpu().numpy() for name in ("input_ids", "labels"))
    mask, positions = (
        None if (x := inputs.get(n)) is None else x.cpu().numpy() for n in ("attention_mask", "position_ids")
    )
    documents_in_batch = []
    for row in range(len(ids)):
        read = np.arange(ids.shape[1]) if mask is None else np.flatnonzero(mask[row])
        # the first start is the row's own, at which nothing is to be split
        starts = np.flatnonzero(positions[row, read] == 0)[1:] if positions is not None else []
        for at in np.split(read, starts):
            if (labels[row, at][1:] != -100).any():
                documents_in_batch.append(((row, at), ids[row, at], labels[row, at]))
    return documents_in_batch
