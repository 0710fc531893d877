"""A tiny model behind `/v1/completions`, in both forms of the question that `completions_client` asks."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


@dataclass
class Reply:
    """An HTTP answer as it goes out. A Content-Length among the headers replaces the true one."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Served:
    """What the server was asked, and how it answers.

    `change(answer, request)` returns the answer to send: a changed one, an HTTP status, or a `Reply`.
    """

    def __init__(self, model: Any, change: Callable[[dict, dict], Any] | None = None):
        self.model, self.change = model.eval(), change
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def answer(self, request: dict[str, Any]) -> Any:
        ids = request["prompt"]
        with torch.no_grad():
            log_p = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        echo = request.get("echo")
        k = request["logprobs"] if echo else request["prompt_logprobs"]
        places = [None]
        for at in range(1, len(ids)):
            values, tokens = log_p[at - 1].topk(k)
            likeliest = dict(zip(tokens.tolist(), values.tolist(), strict=True))
            places.append({ids[at]: float(log_p[at - 1, ids[at]]), **likeliest})
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if echo:
            assert request["return_tokens_as_token_ids"]
            named = [p if p is None else {f"token_id:{t}": x for t, x in p.items()} for p in places]
            own = [None if p is None else p[t] for p, t in zip(places, ids, strict=True)]
            choice["logprobs"] = {
                "tokens": [f"token_id:{t}" for t in [*ids, 1]], "token_logprobs": [*own, -1.0],
                "top_logprobs": [*named, {"token_id:1": -1.0}],
            }  # fmt: skip
        else:
            choice["prompt_logprobs"] = [
                p if p is None else {str(t): {"logprob": x, "rank": 1, "decoded_token": "?"} for t, x in p.items()}
                for p in places
            ]
        answer = {"object": "text_completion", "model": request["model"], "choices": [choice]}
        return answer if self.change is None else self.change(answer, request)


def _reply(answer: Any) -> Reply:
    if isinstance(answer, Reply):
        return answer
    if isinstance(answer, int):
        return Reply(json.dumps({"error": {"message": f"the test says {answer}"}}).encode(), answer)
    return Reply(json.dumps(answer).encode())


@contextlib.contextmanager
def served(model: Any, change: Callable[[dict, dict], Any] | None = None) -> Iterator[Served]:
    """The model on a free port while the context lasts."""
    state, lock = Served(model, change), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            with lock:
                state.requests.append(request)
                state.headers.append(dict(self.headers))
                answer = state.answer(request) if self.path == "/v1/completions" else 404
            reply = _reply(answer)
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(reply.body)

        do_GET = do_POST  # a redirect that is followed may become a GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
