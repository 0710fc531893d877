"""`teacher: server` equals the local teacher on the same support, in both protocols; what goes wrong is said."""

import math
import time
from dataclasses import replace
from email.utils import formatdate

import pytest
import torch
from quick_cases import slow_but
from served import Reply, served
from splits import capture_gradients
from tiny import VOCAB, completions, double_copy, shift_labels_of, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError, NonFiniteError, TeacherServerError
from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_divergence import divergence_reference
from liger_trainer.teachers.connection import CompletionsServer, Question, ServerOptions

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
LOSSES = [{"type": "forward_kl", "weight": 0.8}, {"type": "ce", "weight": 0.25}]


def teacher_model(**sizes):
    return tiny_model("gemma2", seed=5, hidden_size=48, **sizes)  # with a softcap


def make(server=None, teacher=None, data=None, eval_data=None, **options):
    named = {} if server is None else {
        "teacher": "server", "teacher_server_base_url": server.url, "teacher_server_model": "tiny",
        "teacher_server_top_k": 8, "teacher_server_retries": 0,
    }  # fmt: skip
    options = {"losses": LOSSES, "max_steps": 1, "optim": "sgd", **named, **options}
    return LigerDistillTrainer(
        tiny_model(), args=train_args(LigerDistillConfig, **options), teacher_model=teacher,
        train_dataset=data or completions(4), eval_dataset=eval_data, processing_class=tiny_tokenizer(),
    )  # fmt: skip


def step(trainer):
    gradients = capture_gradients(trainer)
    trainer.train()
    return trainer.state.log_history[0], gradients


@pytest.mark.parametrize("protocol, options", [("vllm", {}), ("echo", {"packing": True, "max_length": 24})])
def test_with_the_whole_vocabulary_it_equals_the_local_teacher(protocol, options):
    with served(teacher_model()) as server:
        logs, gradients = step(make(server, teacher_server_top_k=VOCAB, teacher_server_protocol=protocol, **options))
    want_logs, want = step(make(teacher=teacher_model(), **options))
    assert "teacher_entropy" not in logs and "reverse_kl" not in logs
    for name in ("loss", "kd_loss", "ce_loss", "forward_kl", "agreement_at_1", "teacher_perplexity", "entropy"):
        assert logs[name] == pytest.approx(want_logs[name], rel=1e-5), name
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


EVERY = {
    "reverse KL": {"losses": None, "beta": 1.0},
    "JSD": {"losses": None, "beta": 0.3},
    "mix": {"losses": [{"type": kind} for kind in KINDS] + [{"type": "ce", "weight": 0.3}], "beta": 0.4},
    "skewed, one measured": {
        "losses": [{"type": "skew_kl", "weight": 0.5}, {"type": "tvd", "weight": 0.0}], "skew_alpha": 0.3,
    },
    "scheduled": {"losses": [{"type": "forward_kl"}, {"type": "reverse_kl"}],
                  "schedules": {"forward_kl_weight": {"from": 0.0, "to": 1.0}}},
}  # fmt: skip


@pytest.mark.parametrize("losses", slow_but(EVERY, "JSD", "mix"))
def test_any_divergence_equals_the_local_teachers_on_the_whole_vocabulary(losses):
    options = EVERY[losses]
    with served(teacher_model()) as server:
        logs, gradients = step(make(server, teacher_server_top_k=VOCAB, **options))
    want_logs, want = step(make(teacher=teacher_model(), **options))
    terms = [name for name in want_logs if name.startswith("loss/")]
    for name in ("loss", "kd_loss", "ce_loss", "forward_kl", "teacher_perplexity", *terms):
        assert logs[name] == pytest.approx(want_logs[name], rel=1e-4, abs=1e-6), name
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "forward_kl"])
def test_any_divergence_of_a_few_tokens_and_the_rest_as_one(kind):
    """Against the divergence of the coarser distributions in fp64, whose reference knows no lists of tokens."""
    teacher = teacher_model()
    with served(teacher) as server:
        options = {"alpha": 0.2} if "skew" in kind else {"beta": 0.3} if kind == "jsd" else {}
        trainer = make(server, losses=[{"type": kind, **options}])
        student = double_copy(trainer.model)
        logs, gradients = step(trainer)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in trainer.train_dataset:
        ids = torch.tensor([row["input_ids"]])
        keep = shift_labels_of(torch.tensor([row["labels"]]))[0] != -100
        q, p = (model(input_ids=ids).logits[0, keep].softmax(-1) for model in (student, double_copy(teacher)))
        likeliest = p.topk(8, -1).indices
        p, q = (torch.cat([x.gather(-1, likeliest), 1 - x.gather(-1, likeliest).sum(-1, True)], -1) for x in (p, q))
        each = divergence_reference(q.log(), p.log().detach(), kind=kind, beta=0.3, alpha=0.2)
        total, tokens = total + each.sum(), tokens + int(keep.sum())
    (total / tokens).backward()
    assert logs["loss"] == pytest.approx(total.item() / tokens, rel=1e-5)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name].double(), parameter.grad, rtol=1e-3, atol=2e-6, msg=name)


def test_a_few_tokens_and_the_rest_as_one():
    """Against the divergence of the coarser distributions, by hand."""
    teacher = teacher_model()
    with served(teacher) as server:
        trainer = make(server, data=completions(4), losses=None)
        student = double_copy(trainer.model)
        logs, gradients = step(trainer)
    total, tokens, nll = torch.zeros((), dtype=torch.float64), 0, 0.0
    for row in trainer.train_dataset:
        ids = torch.tensor([row["input_ids"]])
        keep = shift_labels_of(torch.tensor([row["labels"]]))[0] != -100
        q = student(input_ids=ids).logits[0, keep].softmax(-1)
        p = double_copy(teacher)(input_ids=ids).logits[0, keep].softmax(-1).detach()
        nll -= p.gather(-1, ids[0].roll(-1)[keep, None]).log().sum().item()
        likeliest = p.topk(8, -1).indices
        p, q = (torch.cat([x.gather(-1, likeliest), 1 - x.gather(-1, likeliest).sum(-1, True)], -1) for x in (p, q))
        total, tokens = total + (p * (p / q).log()).sum(), tokens + int(keep.sum())
    (total / tokens).backward()
    assert logs["loss"] == pytest.approx(total.item() / tokens, rel=1e-5)
    assert logs["teacher_perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name].double(), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_what_is_asked(monkeypatch):
    """One question a document, up to its last supervised token, all at a time; in evaluation only the first time."""
    monkeypatch.setenv("KEY_OF_THE_SERVER", "secret")
    with served(teacher_model()) as server:
        trainer = make(server, data=completions(6), eval_data=completions(3, 7), per_device_eval_batch_size=2,
                       teacher_server_api_key_env="KEY_OF_THE_SERVER")  # fmt: skip
        (probe, *_), _ = server.requests[:1], server.requests.clear()
        first = trainer.evaluate()
        prompts = sorted(map(tuple, (request["prompt"] for request in server.requests)))
        assert prompts == sorted(tuple(row["input_ids"]) for row in trainer.eval_dataset)
        second = trainer.evaluate()
        assert len(server.requests) == 3 and second["eval_loss"] == first["eval_loss"]
    assert probe["prompt"] == trainer.train_dataset[0]["input_ids"][:8]
    assert probe["model"] == "tiny" and probe["prompt_logprobs"] == 8 and probe["max_tokens"] == 1
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)


def test_nothing_behind_the_last_supervised_token_is_asked():
    from liger_trainer.teachers.server import _question

    question = _question(*torch.tensor([[5, 6, 7, 8, 9], [5, -100, 7, -100, -100]]).numpy())
    assert question == ([5, 6, 7], [2])


def options_of(server, **options):
    common = {"url": server.url, "protocol": "vllm", "top_k": 4, "retries": 0, "timeout": 20.0}
    return ServerOptions(model="tiny", **{**common, **options})


QUESTION = Question([3, 1, 4, 1, 5], [1, 2, 3, 4])


def ask(change, pause=lambda seconds: None, **options):
    with served(tiny_model(), change) as server:
        return CompletionsServer(options_of(server, **options), pause).ask([QUESTION])[0]


def of_choice(change):
    def changed(answer, request):
        change(answer["choices"][0])
        return answer

    return changed


@pytest.mark.parametrize(
    "protocol, change, error, message",
    [
        ("vllm", lambda a, r: Reply(b"<html>busy</html>"), TeacherServerError, "1 attempt: the answer is no JSON: <ht"),
        ("vllm", lambda a, r: Reply(b"[" * 100_000), TeacherServerError, "1 attempt: the answer is no JSON"),
        ("vllm", lambda a, r: Reply(b" " * 2**21), ConfigError, "more than 1,063,936 bytes to a prompt of 5 tokens"),
        ("vllm", lambda a, r: {"choices": []}, ConfigError, "another form than teacher_server_protocol: vllm"),
        ("vllm", lambda a, r: [1, 2], ConfigError, "another form than"),
        ("echo", lambda a, r: {"choices": [{"prompt_logprobs": []}]}, ConfigError, "another form .* echo .*logprobs"),
        ("vllm", lambda a, r: 400, ConfigError, "refuses: HTTP 400 .*the test says 400"),
        ("vllm", lambda a, r: 404, ConfigError, "refuses: HTTP 404"),
        ("vllm", lambda a, r: 401, ConfigError, "refuses: HTTP 401"),
        ("vllm", lambda a, r: 503, TeacherServerError, "1 attempt: HTTP 503"),
        ("vllm", of_choice(lambda c: c["prompt_logprobs"].pop()), ConfigError, "5 were sent and 4 read"),
        ("vllm", of_choice(lambda c: c["prompt_logprobs"].insert(1, c["prompt_logprobs"][1])), ConfigError,
         "5 were sent and 6 read"),
        ("vllm", of_choice(lambda c: c["prompt_logprobs"][3].pop("1")), ConfigError, "place 3 stands another token"),
        ("vllm", of_choice(lambda c: c.update(prompt_token_ids=[2, 3, 1, 4, 1])), ConfigError, "from place 0 on"),
        ("echo", of_choice(lambda c: c["logprobs"]["tokens"].insert(0, "token_id:2")), ConfigError,
         "5 read; they differ from place 0"),
        ("echo", of_choice(lambda c: c["logprobs"].update(tokens=["a"] * 6)), ConfigError, "named by their ids"),
        ("echo", of_choice(lambda c: c["logprobs"].update(tokens=c["logprobs"]["tokens"][:3])), ConfigError,
         "5 were sent and 3 read"),
        ("vllm", of_choice(lambda c: c["prompt_logprobs"].__setitem__(2, {"4": {"logprob": -1.0}})), ConfigError,
         "gives 1 tokens .* where 4 were asked"),
        ("vllm", of_choice(lambda c: [e.update(logprob=math.nan) for e in c["prompt_logprobs"][2].values()]),
         NonFiniteError, "NaN"),
        ("vllm", of_choice(lambda c: [e.update(logprob=7.5) for e in c["prompt_logprobs"][2].values()]),
         ConfigError, "add up to .*no log-probabilities"),
        ("vllm", of_choice(lambda c: [e.update(logprob=-math.inf) for e in c["prompt_logprobs"][2].values()]),
         ConfigError, "-inf for every token of a place"),
    ],
)  # fmt: skip
def test_answers_that_are_refused(protocol, change, error, message):
    with pytest.raises(error, match=message):
        ask(change, protocol=protocol)


def test_a_server_that_lists_no_token_beyond_the_likeliest():
    """The one that stands at a place is then known from `token_logprobs` alone."""

    def likeliest_alone(choice):
        places = choice["logprobs"]["top_logprobs"]
        for known in places[1:-1]:
            kept = sorted(known, key=known.get)[-4:]
            for token in set(known) - set(kept):
                del known[token]

    got, want = ask(of_choice(likeliest_alone), protocol="echo"), ask(None)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.tolist() == theirs.tolist()
    assert (want.label_log_prob < want.log_probs[:, -1]).any()


def test_exit_codes():
    assert (ConfigError.exit_code, TeacherServerError.exit_code, NonFiniteError.exit_code) == (2, 7, 5)


def test_failures_that_pass_are_tried_again():
    """After longer and longer pauses, and no oftener than `retries` says."""
    bad = [503, Reply(b"<html>"), 429, Reply(b'{"choices"', headers={"Content-Length": "999"})]  # the last breaks off
    left, pauses = bad[:], []
    answer = ask(lambda a, r: left.pop(0) if left else a, pauses.append, retries=4)
    assert pauses == [0.5, 1.0, 2.0, 4.0] and answer.ids.shape == (4, 4)
    left, pauses = [503] * 9, []
    with pytest.raises(TeacherServerError, match="3 attempts: HTTP 503"):
        ask(lambda a, r: left.pop(), pauses.append, retries=2)
    assert len(left) == 6 and len(pauses) == 2


@pytest.mark.parametrize(
    "header, least, most",
    [
        ("7.5", 7.5, 7.5),
        ("0", 0, 0),
        ("-3", 0, 0),
        ("86400", 60, 60),
        ("inf", 60, 60),
        ("nan", 0.5, 0.5),
        ("soon", 0.5, 0.5),
        ("Fri, 31 Dec 2100 23:59:59 GMT", 60, 60),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", 0.5, 0.5),
    ],
)
def test_retry_after(header, least, most):
    """Seconds or a date, up to a minute; our own pause where it is neither."""
    left, pauses = [Reply(status=429, headers={"Retry-After": header})], []
    ask(lambda a, r: left.pop() if left else a, pauses.append, retries=1)
    assert least <= pauses[0] <= most and len(pauses) == 1


def test_retry_after_as_a_date_to_come():
    pauses = []

    def busy(answer, request):
        at = formatdate(time.time() + 20, usegmt=True)
        return answer if pauses else Reply(status=503, headers={"Retry-After": at})

    ask(busy, pauses.append, retries=1)
    assert 15 < pauses[0] <= 20


@pytest.mark.parametrize("status, elsewhere", [(301, True), (302, False), (303, True), (307, True), (308, False)])
def test_redirects_are_not_followed(status, elsewhere):
    """So neither the key nor the prompt reaches a server that nobody named."""
    with served(tiny_model()) as other, served(tiny_model()) as server:
        target = f"{other.url}/completions?token=x" if elsewhere else "/v1/completions?token=x"
        server.change = lambda a, r: Reply(status=status, headers={"Location": target})
        options = options_of(server, api_key="secret", retries=1)
        where = other.url if elsewhere else server.url
        with pytest.raises(ConfigError, match=rf"redirects to {where}/completions \(HTTP {status}\)"):
            CompletionsServer(options).ask([QUESTION])
        assert len(server.requests) == 1 and not other.requests and not other.headers


@pytest.mark.parametrize("status, error", [(401, ConfigError), (503, TeacherServerError)])
def test_messages_do_not_show_the_key(status, error):
    """Some servers quote it: "Incorrect API key provided: ..."."""
    quote = Reply(b"no such key: sk-secret", status)
    with served(tiny_model(), lambda a, r: quote) as server:
        url = server.url.replace("http://", "http://user:password@")
        with pytest.raises(error, match=rf"http://127.* HTTP {status} .*no such key: <secret>") as caught:
            CompletionsServer(replace(options_of(server, api_key="sk-secret"), url=url)).ask([QUESTION])
        assert "password" not in str(caught.value)


def test_a_slow_server_and_none_at_all():
    def slow(answer, request):
        time.sleep(0.4)
        return answer

    with pytest.raises(TeacherServerError, match="1 attempt: no answer within 0.1 s"):
        ask(slow, timeout=0.1)
    with served(tiny_model()) as server:
        pass
    with pytest.raises(TeacherServerError, match="2 attempts: .*refused"):
        CompletionsServer(options_of(server, retries=1), lambda seconds: None).ask([QUESTION])


def test_several_servers_share_the_requests():
    """And give the loss and gradients of one."""
    with served(teacher_model()) as one, served(teacher_model()) as other, served(teacher_model()) as alone:
        logs, gradients = step(make(one, data=completions(8), teacher_server_base_url=[one.url, other.url]))
        want_logs, want = step(make(alone, data=completions(8)))
        asked = [server.requests for server in (one, other)]
        assert all(requests and requests[0]["prompt"] == alone.requests[0]["prompt"] for requests in asked)
        assert min(len(requests) for requests in asked) > 1
        assert sum(map(len, asked)) == len(alone.requests) + 1  # each is asked about the first tokens
    assert logs["loss"] == want_logs["loss"]
    assert all(torch.equal(gradient, want[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("broken", [503, Reply(b"<html>"), Reply(b"{", headers={"Content-Length": "99"})])
def test_another_server_takes_over(broken):
    """At once, without a pause, and the one that failed is left alone."""
    pauses = []
    with served(tiny_model(), lambda a, r: broken) as bad, served(tiny_model()) as good:
        options = options_of(bad, url=[bad.url, good.url], retries=0, concurrency=1)
        answers = CompletionsServer(options, pauses.append).ask([QUESTION] * 6)
        assert len(bad.requests) == 1 and len(good.requests) == 6 and len(answers) == 6 and not pauses
        good.change = lambda a, r: 503
        with pytest.raises(TeacherServerError, match="2 attempts: .*The other 1 failed too"):
            CompletionsServer(replace(options, retries=1), pauses.append).ask([QUESTION])
        assert pauses == [0.5] and len(bad.requests) == 3


def test_a_server_that_is_gone_is_replaced_and_one_that_refuses_is_not():
    with served(tiny_model()) as gone:
        pass
    with served(tiny_model(), lambda a, r: 404) as refuses, served(tiny_model()) as good:
        CompletionsServer(options_of(good, url=[gone.url, good.url])).ask([QUESTION])
        with pytest.raises(ConfigError, match=rf"{refuses.url}/completions refuses: HTTP 404"):
            CompletionsServer(options_of(good, url=[refuses.url, good.url])).ask([QUESTION])
        with pytest.raises(ConfigError, match="names a server twice"):
            CompletionsServer(options_of(good, url=[good.url, good.url]))


def test_servers_of_different_models_are_refused():
    def surer(seed):
        model = tiny_model("granite", seed=seed)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20.0)
        return model

    with served(surer(3)) as one, served(surer(4)) as other:
        urls = [one.url, other.url]
        with pytest.raises(ConfigError, match=rf"{one.url}/completions and {other.url}/.* serve different models"):
            make(one, teacher_server_base_url=urls)
        other.model = surer(3).to(torch.bfloat16)  # rounding is no other model
        make(one, teacher_server_base_url=urls)


def test_a_run_whose_server_goes_away_is_saved_and_resumed(tmp_path):
    """Between two checkpoints, with two micro-batches a step; it ends with the weights of a run that had its server."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100, "gradient_accumulation_steps": 2,
               "teacher_server_retries": 0, "teacher_server_concurrency": 1}  # fmt: skip
    with served(teacher_model()) as server:
        whole = make(server, data=completions(32), output_dir=str(tmp_path / "whole"), **options)
        whole.train()
        before = len(server.requests)
    left = [before * 5 // 8]  # of the requests, so that it fails in the middle of step 3

    def leaving(answer, request):
        left[0] -= 1
        return answer if left[0] >= 0 else 503

    out = tmp_path / "out"
    with served(teacher_model(), leaving) as server:
        for how in (r"train\(resume_from_checkpoint=True\)", f"liger-trainer resume {out}"):
            trainer = make(server, data=completions(32), output_dir=str(out), **options)
            with pytest.raises(TeacherServerError, match=rf"HTTP 503.* after step 2; .*/checkpoint-2 is saved.* {how}"):
                trainer.train(resume_from_checkpoint=(out / "config.yaml").exists())
            left[0] = 1  # the question of the trainer's beginning
            (out / "config.yaml").write_text("")  # as of a run by a command
        left[0] = 1000
        again = make(server, data=completions(32), output_dir=str(out), **options)
        again.train(resume_from_checkpoint=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))


def test_tokens_beyond_the_students_are_refused_before_training():
    with (
        served(teacher_model(vocab_size=VOCAB + 8)) as server,
        pytest.raises(ConfigError, match="names token (6[4-9]|7[01]), and the student's tokenizer has 64"),
    ):
        make(server, teacher_server_top_k=VOCAB)


def test_a_missing_key(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with served(teacher_model()) as server, pytest.raises(ConfigError, match="environment variable NO_KEY is not set"):
        make(server, teacher_server_api_key_env="NO_KEY")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"teacher_server_base_url": None}, "teacher_server_base_url: missing; `teacher: server` needs it"),
        ({"teacher_server_model": None}, "teacher_server_model: missing; `teacher: server` needs it"),
        ({"teacher_server_base_url": "localhost:8000"}, "expected an address such as http"),
        ({"teacher_server_base_url": ["http://a/v1", "b:80"]}, "expected an address such as http"),
        ({"teacher_server_base_url": []}, "teacher_server_base_url: missing"),
        ({"teacher_server_protocol": "trl"}, "teacher_server_protocol: expected one of vllm, echo"),
        ({"teacher_server_top_k": 0}, "teacher_server_top_k: expected a number of at least 1"),
        ({"taid": {"start": 0.4}}, "taid: it mixes logits of the whole vocabulary"),
        ({"losses": [{"type": "hidden_mse"}, {"type": "forward_kl"}]}, "hidden_mse needs the teacher's model"),
        ({"beta": 1.0, "kd_temperature": 2.0}, "kd_temperature: a server's log-probabilities are of temperature 1"),
        ({"losses": [{"type": "ce"}]}, "the loss asks for no divergence"),
        ({"label_smoothing_factor": 0.1}, "not part of the loss against a teacher's server"),
        ({"teacher_dtype": "bfloat16"}, "teacher_dtype: has no effect with `teacher: self` or `server`"),
    ],
)
def test_settings_that_are_refused(options, message):
    given = {"teacher": "server", "teacher_server_base_url": "http://localhost/v1", "teacher_server_model": "m"}
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **{**given, **options})


ON_POLICY = {"lmbda": 1.0, "max_completion_length": 6, "max_steps": 2, "learning_rate": 1e-2, "seed": 3}


@pytest.mark.parametrize("losses", [{"losses": None, "beta": 1.0}, {"losses": LOSSES[:1]}], ids=["reverse KL", "mix"])
def test_on_policy_the_server_scores_what_the_student_samples(losses):
    """With the whole vocabulary as the local teacher does: the same completions, and the same loss on them."""
    options = {**ON_POLICY, **losses}
    with served(teacher_model()) as server:
        trainer = make(server, teacher_server_top_k=VOCAB, **options)
        trainer.train()
        asked = [tuple(request["prompt"]) for request in server.requests[1:]]
        assert len(trainer.teaching._known) == 0, "sampled rows do not come again"
    live = make(teacher=teacher_model(), **options)
    live.train()
    data = {tuple(row["input_ids"]) for row in trainer.train_dataset}
    assert asked and not data & set(asked)
    for logs, want in zip(trainer.state.log_history[:2], live.state.log_history[:2], strict=True):
        for name in ("loss", "forward_kl", "completion_length", "on_policy_share", "teacher_perplexity"):
            assert logs[name] == pytest.approx(want[name], rel=1e-4), name
    for mine, theirs in zip(trainer.model.parameters(), live.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_on_policy_and_off_by_turns_with_a_few_tokens():
    """Half of the micro-batches sampled; evaluations, of the dataset's completions, ask for their rows once."""
    with served(teacher_model()) as server:
        trainer = make(server, data=completions(16), eval_data=completions(3, 7), gradient_accumulation_steps=4,
                       **{**ON_POLICY, "lmbda": 0.5})  # fmt: skip
        trainer.train()
        first = trainer.evaluate()
        asked = len(server.requests)
        assert trainer.evaluate()["eval_loss"] == first["eval_loss"] and len(server.requests) == asked
    logs = trainer.state.log_history[0]
    assert {"on_policy/forward_kl", "off_policy/forward_kl"} <= logs.keys() and 0 < logs["on_policy_share"] < 1


def test_on_policy_what_a_server_cannot_do():
    with served(teacher_model()) as server, pytest.raises(ConfigError, match="one teacher in this process writes"):
        make(server, seq_kd=True)
