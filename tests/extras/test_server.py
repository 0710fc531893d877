"""`teacher: server` equals the local teacher on the same support, in both protocols; what goes wrong is said."""

import math
import time
from dataclasses import replace
from email.utils import formatdate

import pytest
import torch
from datasets import Dataset
from served import Reply, served
from tiny import VOCAB, completions, double_copy, tiny_model
from trainings import a_teacher, assert_same_step, distill, step, supervised_logits, trained

from liger_trainer.errors import ConfigError, NonFiniteError, TeacherServerError
from liger_trainer.extras.teachers.connection import CompletionsServer, Question, ServerOptions
from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.kernels.linear_divergence import divergence_reference

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
LOSSES = [{"type": "forward_kl", "weight": 0.8}, {"type": "ce", "weight": 0.25}]


def make(server, data=None, eval_data=None, **options):
    named = {
        "teacher_server_base_url": server.url, "teacher_server_model": "tiny", "teacher_server_top_k": 8,
        "teacher_server_retries": 0,
    }  # fmt: skip
    options = {"losses": LOSSES, "max_steps": 1, "optim": "sgd", **named, **options}
    return distill(None, "server", data or completions(4), eval_data, **options)


def local(**options):
    return distill(data=completions(4), **{"losses": LOSSES, "max_steps": 1, "optim": "sgd", **options})


@pytest.mark.parametrize("protocol, options", [("vllm", {}), ("echo", {"packing": True, "max_length": 24})])
def test_with_the_whole_vocabulary_it_equals_the_local_teacher(protocol, options):
    with served(a_teacher()) as server:
        trainer = make(server, teacher_server_top_k=VOCAB, teacher_server_protocol=protocol, **options)
        names = ("loss", "kd_loss", "ce_loss", "forward_kl", "agreement_at_1", "teacher_perplexity", "entropy")
        logs = assert_same_step(trainer, local(**options), 1e-5, names)
    assert "teacher_entropy" not in logs and "reverse_kl" not in logs


@pytest.mark.parametrize("kind", KINDS)
def test_any_divergence_of_a_few_tokens_and_the_rest_as_one(kind):
    """Against the divergence of the coarser distributions in fp64, whose reference knows no lists of tokens."""
    teacher = a_teacher()
    with served(teacher) as server:
        options = {"alpha": 0.2} if "skew" in kind else {"beta": 0.3} if kind == "jsd" else {}
        trainer = make(server, losses=[{"type": kind, **options}])
        student = double_copy(trainer.model)
        logs, gradients = step(trainer)
    total, tokens, nll = torch.zeros((), dtype=torch.float64), 0, 0.0
    for row in trainer.train_dataset:
        *logits, targets = supervised_logits((student, double_copy(teacher)), row)
        q, p = (x.softmax(-1) for x in logits)
        nll -= p.gather(-1, targets[:, None]).log().sum().item()
        likeliest = p.topk(8, -1).indices
        p, q = (torch.cat([x.gather(-1, likeliest), 1 - x.gather(-1, likeliest).sum(-1, True)], -1) for x in (p, q))
        each = divergence_reference(q.log(), p.log().detach(), kind=kind, beta=0.3, alpha=0.2)
        total, tokens = total + each.sum(), tokens + len(targets)
    (total / tokens).backward()
    assert logs["loss"] == pytest.approx(total.item() / tokens, rel=1e-5)
    assert logs["teacher_perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name].double(), parameter.grad, rtol=1e-3, atol=2e-6, msg=name)


def test_what_is_asked(monkeypatch):
    """One question a document, up to its last supervised token, all at a time; in evaluation only the first time."""
    monkeypatch.setenv("KEY_OF_THE_SERVER", "secret")
    with served(a_teacher()) as server:
        trainer = make(server, data=completions(6), eval_data=completions(3, 7), per_device_eval_batch_size=2,
                       teacher_server_api_key_env="KEY_OF_THE_SERVER")  # fmt: skip
        probe = server.requests[0]
        server.requests.clear()
        first = trainer.evaluate()
        prompts = sorted(map(tuple, (request["prompt"] for request in server.requests)))
        assert prompts == sorted(tuple(row["input_ids"]) for row in trainer.eval_dataset)
        second = trainer.evaluate()
        assert len(server.requests) == 3 and second["eval_loss"] == first["eval_loss"]
    assert probe["prompt"] == trainer.train_dataset[0]["input_ids"][:8]
    assert probe["model"] == "tiny" and probe["prompt_logprobs"] == 8 and probe["max_tokens"] == 1
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)


def test_nothing_behind_the_last_supervised_token_is_asked():
    turns = [{"role": role, "content": word} for role, word in (("user", "w1"), ("assistant", "w2"), ("user", "w3"))]
    with served(a_teacher()) as server:
        trainer = trained(make(server, data=Dataset.from_list([{"messages": turns}] * 4), assistant_only_loss=True))
    whole = trainer.train_dataset[0]["input_ids"]
    asked = [request["prompt"] for request in server.requests[1:]]
    assert asked == [whole[: whole.index(VOCAB - 3) + 1]] and len(asked[0]) < len(whole)


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


def at(place, **entry):
    """Every token that is listed at a place gets this entry."""
    return of_choice(lambda choice: [listed.update(entry) for listed in choice["prompt_logprobs"][place].values()])


def places(change):
    return of_choice(lambda choice: change(choice["prompt_logprobs"]))


def echoed(change):
    return of_choice(lambda choice: choice["logprobs"].update(tokens=change(choice["logprobs"]["tokens"])))


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
        ("vllm", places(lambda x: x.pop()), ConfigError, "5 were sent and 4 read"),
        ("vllm", places(lambda x: x.insert(1, x[1])), ConfigError, "5 were sent and 6 read"),
        ("vllm", places(lambda x: x[3].pop("1")), ConfigError, "place 3 stands another token"),
        ("vllm", of_choice(lambda c: c.update(prompt_token_ids=[2, 3, 1, 4, 1])), ConfigError, "from place 0 on"),
        ("echo", echoed(lambda x: ["token_id:2", *x]), ConfigError, "5 read; they differ from place 0"),
        ("echo", echoed(lambda _: ["a"] * 6), ConfigError, "named by their ids"),
        ("echo", echoed(lambda x: x[:3]), ConfigError, "5 were sent and 3 read"),
        ("vllm", places(lambda x: x.__setitem__(2, {"4": {"logprob": -1.0}})), ConfigError, "gives 1 .* where 4 were"),
        ("vllm", at(2, logprob=math.nan), NonFiniteError, "NaN"),
        ("vllm", at(2, logprob=7.5), ConfigError, "add up to .*no log-probabilities"),
        ("vllm", at(2, logprob=-math.inf), ConfigError, "-inf for every token of a place"),
    ],
)
def test_answers_that_are_refused(protocol, change, error, message):
    with pytest.raises(error, match=message):
        ask(change, protocol=protocol)


def test_a_server_that_lists_no_token_beyond_the_likeliest():
    """The one that stands at a place is then known only from `token_logprobs`."""

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


IN_20_SECONDS = object()
RETRY_AFTER = [
    ("7.5", 7.5, 7.5), ("0", 0, 0), ("-3", 0, 0), ("86400", 60, 60), ("inf", 60, 60), ("nan", 0.5, 0.5),
    ("soon", 0.5, 0.5), ("Fri, 31 Dec 2100 23:59:59 GMT", 60, 60), ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0),
    ("Sun, 99 Nov 1994 08:49:37 GMT", 0.5, 0.5), (IN_20_SECONDS, 15, 20),
]  # fmt: skip


@pytest.mark.parametrize("header, least, most", RETRY_AFTER)
def test_retry_after(header, least, most):
    """Seconds or a date, up to a minute; our own pause where it is neither."""
    pauses, asked = [], []

    def busy(answer, request):
        asked.append(1)
        at = formatdate(time.time() + 20, usegmt=True) if header is IN_20_SECONDS else header
        return answer if len(asked) > 1 else Reply(status=429, headers={"Retry-After": at})

    ask(busy, pauses.append, retries=1)
    assert least <= pauses[0] <= most and len(pauses) == 1


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
    with served(a_teacher()) as one, served(a_teacher()) as other, served(a_teacher()) as single:
        logs, gradients = step(make(one, data=completions(8), teacher_server_base_url=[one.url, other.url]))
        want_logs, want = step(make(single, data=completions(8)))
        asked = [server.requests for server in (one, other)]
        assert all(requests and requests[0]["prompt"] == single.requests[0]["prompt"] for requests in asked)
        assert min(len(requests) for requests in asked) > 1
        assert sum(map(len, asked)) == len(single.requests) + 1  # each is asked about the first tokens
    assert logs["loss"] == want_logs["loss"]
    assert all(torch.equal(gradient, want[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("broken", [503, Reply(b"<html>"), Reply(b"{", headers={"Content-Length": "99"})])
def test_another_server_takes_over(broken):
    """At once, without a pause, and the one that failed is not asked again."""
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
    with served(a_teacher()) as server:
        whole = trained(make(server, data=completions(32), output_dir=str(tmp_path / "whole"), **options))
        before = len(server.requests)
    left = [before * 5 // 8]  # of the requests, so that it fails in the middle of step 3

    def leaving(answer, request):
        left[0] -= 1
        return answer if left[0] >= 0 else 503

    out = tmp_path / "out"
    with served(a_teacher(), leaving) as server:
        for how in (r"train\(resume_from_checkpoint=True\)", f"liger-trainer resume {out}"):
            trainer = make(server, data=completions(32), output_dir=str(out), **options)
            with pytest.raises(TeacherServerError, match=rf"HTTP 503.* after step 2; .*/checkpoint-2 is saved.* {how}"):
                trainer.train(resume_from_checkpoint=(out / "config.yaml").exists())
            left[0] = 1  # the question of the trainer's beginning
            (out / "config.yaml").write_text("")  # as of a run by a command
        left[0] = 1000
        again = trained(make(server, data=completions(32), output_dir=str(out), **options), True)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))


def test_what_is_refused_before_training(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    for teacher, options, message in (
        (a_teacher(vocab_size=VOCAB + 8), {"teacher_server_top_k": VOCAB},
         "names token (6[4-9]|7[01]), and the student's tokenizer has 64"),
        (a_teacher(), {"teacher_server_api_key_env": "NO_KEY"}, "environment variable NO_KEY is not set"),
        (a_teacher(), {"seq_kd": True}, "one teacher in this process writes"),
    ):  # fmt: skip
        with served(teacher) as server, pytest.raises(ConfigError, match=message):
            make(server, **options)


ON_POLICY = {"lmbda": 1.0, "max_completion_length": 6, "max_steps": 2, "learning_rate": 1e-2, "seed": 3}


@pytest.mark.parametrize("losses", [{"losses": None, "beta": 1.0}, {"losses": LOSSES[:1]}], ids=["reverse KL", "mix"])
def test_on_policy_the_server_scores_what_the_student_samples(losses):
    """With the whole vocabulary as the local teacher does: the same completions, and the same loss on them.
    Evaluations, of the dataset's completions, ask for their rows once."""
    options = {**ON_POLICY, **losses}
    with served(a_teacher()) as server:
        trainer = trained(make(server, eval_data=completions(3, 7), teacher_server_top_k=VOCAB, **options))
        asked = [tuple(request["prompt"]) for request in server.requests[1:]]
        first = trainer.evaluate()["eval_loss"]
        all_ = len(server.requests)
        assert trainer.evaluate()["eval_loss"] == first and len(server.requests) == all_ > len(asked) + 1
    live = trained(local(**options))
    data = {tuple(row["input_ids"]) for row in trainer.train_dataset}
    assert asked and not data & set(asked)
    for logs, want in zip(trainer.state.log_history[:2], live.state.log_history[:2], strict=True):
        for name in ("loss", "forward_kl", "completion_length", "on_policy_share", "teacher_perplexity"):
            assert logs[name] == pytest.approx(want[name], rel=1e-4), name
    for mine, theirs in zip(trainer.model.parameters(), live.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
