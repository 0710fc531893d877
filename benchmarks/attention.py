"""Attention within documents: errors, time beside sdpa, FlashAttention-2 and FlexAttention, and a sweep of its tiles.

    python -m benchmarks.attention [seconds: 78]
    ATTENTION_LENGTH=2048 python -m benchmarks.attention    # other lengths: times only

Forward and backward together, of one row of 8192 tokens in bf16, for heads of 64 to 512 columns. Errors are relative L2
distances from plain torch in fp32. Prints lines as it has them, and writes attention-LENGTH.json into $OUT or the
current folder. Needs a GPU. Processes of their own compile ahead, without launching; one process times, in turn.
"""

import ctypes
import json
import multiprocessing as mp
import os
import queue
import signal
import statistics
import sys
import time

START = time.monotonic()
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from liger_trainer.kernels import document_attention as da  # noqa: E402

SWEPT = 8192
S = int(os.environ.get("ATTENTION_LENGTH", SWEPT))
# name: D, query heads, key heads, window, sinks, is FlexAttention timed; those asked for first
CASES = {
    "D64 W128 sinks 64/8": (64, 64, 8, 128, True, True),
    "D128 full 16/8": (128, 16, 8, None, False, True),
    "D256 W512 4/1": (256, 4, 1, 512, False, True),
    "D512 full 8/1": (512, 8, 1, None, False, True),
    "D256 full 4/1": (256, 4, 1, None, False, False),
    "D64 full sinks 64/8": (64, 64, 8, None, True, False),
    "D256 W1024 8/4": (256, 8, 4, 1024, False, False),
}
PACKED = ("D64 W128 sinks 64/8", "D256 W512 4/1")  # checked with documents of several lengths, too
ENDS = [0, 5, 5, 2999, 3001, 7000, SWEPT]
SWEEPS = {  # case: kernel: tiles (queries, keys, warps, stages)
    "D256 W512 4/1": {
        "forward": [(64, 32, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2)],
        "dq": [(64, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 1)],
        "dkdv": [(32, 64, 8, 2), (64, 32, 4, 2), (64, 64, 8, 1), (32, 64, 8, 1)],
    },
    "D512 full 8/1": {
        "forward": [(64, 32, 8, 2), (64, 64, 8, 1), (64, 32, 4, 2), (128, 32, 8, 1)],
        "dq": [(64, 32, 8, 1), (64, 16, 8, 2)],
        "dk": [(32, 64, 8, 1), (16, 64, 8, 2)],
        "dv": [(32, 64, 8, 1), (32, 64, 8, 2)],
    },
    "D256 full 4/1": {  # the same kernels as the first but for the window
        "forward": [(64, 32, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2)],
        "dq": [(64, 32, 8, 2), (64, 32, 4, 2)],
        "dkdv": [(32, 64, 8, 2), (64, 32, 4, 2), (64, 64, 8, 1)],
    },
    "D64 W128 sinks 64/8": {
        "forward": [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3)],
        "dkdv": [(64, 64, 4, 2), (32, 64, 4, 3)],
    },
    "D128 full 16/8": {
        "forward": [(64, 32, 4, 3), (128, 64, 8, 3)],
        "dkdv": [(64, 64, 4, 2), (64, 128, 8, 2)],
    },
}
DEVICE, DTYPE = "cuda", torch.bfloat16
NOW = time.monotonic
LIMIT = 78.0  # seconds


def left() -> float:
    """Return the seconds that are left."""
    return LIMIT - (NOW() - START)


def operands(case):
    D, hq, hk, _, sinks, _ = CASES[case]
    torch.manual_seed(0)
    q, up = (torch.randn(S, hq, D, device=DEVICE, dtype=DTYPE) for _ in range(2))
    k, v = (torch.randn(S, hk, D, device=DEVICE, dtype=DTYPE) for _ in range(2))
    s = torch.randn(hq, device=DEVICE, dtype=torch.float32) if sinks else None
    return q, k, v, s, up


def leaves(tensors):
    return [x.detach().requires_grad_() for x in tensors[:4] if x is not None], tensors[4]


# Providers: (tensors of a case) -> output (S, Hq, D)


def ours(case):
    window = CASES[case][3]
    return lambda q, k, v, s=None: da.document_attention(q, k, v, S, window=window, sinks=s)


def sdpa(case):
    """As transformers calls it: without a mask by is_causal, else repeated keys and a mask of S x S."""
    D, hq, hk, window, _, _ = CASES[case]
    mask = None
    if window:
        at = torch.arange(S, device=DEVICE)
        mask = ((at <= at[:, None]) & (at > at[:, None] - window))[None, None]
    gqa = hq != hk and mask is None and D <= 256

    def call(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if hq != hk and not gqa:
            k, v = (x.repeat_interleave(hq // hk, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)[0].transpose(0, 1)

    return call


def flash(case):
    """PyTorch's FlashAttention-2, the form for documents, which knows windows."""
    window = CASES[case][3]
    ends = torch.tensor([0, S], dtype=torch.int32, device=DEVICE)
    attend = torch.ops.aten._flash_attention_forward
    return lambda q, k, v: attend(
        q, k, v, ends, ends, S, S, 0.0, window is None, False, window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )[0]  # fmt: skip


def eager(case):
    """gpt-oss' own, in bf16: repeated keys, a column of sinks, softmax."""
    D, hq, hk, window, _, _ = CASES[case]
    at = torch.arange(S, device=DEVICE)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or S))
    mask = torch.zeros(S, S, device=DEVICE, dtype=DTYPE).masked_fill(~seen, float("-inf"))

    def call(q, k, v, s):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(hq // hk, 0) for x in (k, v))
        scores = q @ k.mT * D**-0.5 + mask
        scores = torch.cat([scores, s[:, None, None].to(q.dtype).expand(-1, S, 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return (scores.softmax(-1)[..., :S] @ v).transpose(0, 1)

    return call


def flex(case):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window = CASES[case][3]

    def sees(b, h, i, j):
        return (i >= j) & (i - j < window) if window else i >= j

    mask = create_block_mask(sees, None, None, S, S, device=DEVICE)

    def call(q, k, v, s=None):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if s is None:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        o, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return (o * torch.sigmoid(lse - s[None, :, None])[..., None].to(o.dtype))[0].transpose(0, 1)

    return torch.compile(call, dynamic=False)


PROVIDERS = {"ours": ours, "sdpa": sdpa, "flash": flash, "eager": eager, "flex": flex}


def step_of(name, case):
    inputs, up = leaves(operands(case))
    attend = PROVIDERS[name](case)

    def step():
        return torch.autograd.grad(attend(*inputs), inputs, up)

    return step


def timed(step, budget=0.25):
    """Median ms of a call: of CUDA graphs if it can be captured, else launched."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(), step(), b.record()
        torch.cuda.synchronize()
        once = a.elapsed_time(b)
        run, how = step, "launched"
        if once < 30:
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
                run, how = graph.replay, "graph"
                run()
            except Exception as error:
                how = f"launched ({type(error).__name__})"
                torch.cuda.synchronize()
        times = []
        for _ in range(int(min(20, max(2, budget * 1e3 / max(once, 1e-3))))):
            a.record(), run(), b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b))
    return statistics.median(times), how


def kernel_ms(run):
    """Median ms of three runs of 4 launches."""
    run()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(3):
        a.record(), [run() for _ in range(4)], b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 4)
    return statistics.median(times)


# What compiles ahead, in processes of its own


def launches_of(case, kind, tiles, packed=False):
    """A launch of one kernel with given tiles, of empty-handed tensors: only its time counts."""
    q, k, v, s, do = operands(case)
    D, hq, hk, window, _, _ = CASES[case]
    bounds = da.document_bounds(torch.tensor(ENDS, dtype=torch.int32, device=DEVICE), S) if packed else None
    call = da._Call(S, hq // hk, D, 0 if packed else S, D**-0.5, None, window, False, da.architecture_of(q.device))
    o, lse, delta = torch.empty_like(q), torch.full((hq, S), 8.0, device=DEVICE), torch.zeros(hq, S, device=DEVICE)
    before = da.tiles_of
    if tiles is not None:
        da.tiles_of = lambda *_: da.Tiles(*tiles)
    da._launch.cache_clear()
    try:
        if kind == "forward":
            launch = da._launch(kind, hq, call, da._strides(q, k, v, o))
            return lambda: launch(q, k, v, o, lse, s, bounds)
        if kind == "dq":
            launch = da._launch(kind, hq, call, da._strides(q, k, v, o, do, q))
            return lambda: launch(q, k, v, o, do, lse, delta, torch.empty_like(q), bounds)
        parts = da.parts_of(kind, hk, call)
        made = [x.new_empty(parts, *x.shape, dtype=torch.float32) if parts > 1 else torch.empty_like(x) for x in (k, v)]
        of_part = [x[0] if parts > 1 else x for x in made]
        launch = da._launch(kind, hk * parts, call, (*da._strides(q, k, v, do, *of_part), k.numel()), parts)

        def run():
            launch(q, k, v, do, lse, delta, *made, bounds)
            if parts > 1:
                for x in made if kind == "dkdv" else made[:1]:
                    x.sum(0).to(k.dtype)

        return run
    finally:
        da.tiles_of = before
        da._launch.cache_clear()


def die_with_parent():
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)


def compiler(jobs, done):
    """Compiles without a launch, so that the GPU is left to what is timed."""
    die_with_parent()
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **how: run(self, *args, grid=grid, warmup=True, **how)
    while (job := jobs.get()) is not None:
        error = ""
        try:
            launches_of(*job)()
        except Exception as failure:
            error = in_short(failure)
        done.put((job, error))


def in_short(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:150] if lines else ''}"


def flex_worker(case, pipe):
    """Compiles at once, then times when told."""
    die_with_parent()
    try:
        step = step_of("flex", case)
        step()
        torch.cuda.synchronize()
        pipe.send("ready")
        pipe.recv()
        pipe.send(timed(step))
    except Exception as error:
        pipe.send(in_short(error))


def reference_by_heads(q, k, v, s, up, ends, window):
    """fp32 truth of a case, a key head at a time."""
    group, found = q.shape[1] // k.shape[1], []
    for h in range(k.shape[1]):
        mine = slice(h * group, (h + 1) * group)
        parts = [q[:, mine], k[:, h : h + 1], v[:, h : h + 1]] + ([] if s is None else [s[mine]])
        parts = [x.float().detach().requires_grad_() for x in parts]
        o = da.document_attention_reference(*parts[:3], ends, window=window, sinks=None if s is None else parts[3])
        found.append([o.detach(), *torch.autograd.grad(o, parts, up[:, mine].float())])
    return [torch.cat([f[i] for f in found], 0 if i == 4 else 1) for i in range(len(found[0]))]


def check(case, packed):
    """Relative L2 errors of output and gradients from fp32, and whether two runs give the same bits."""
    q, k, v, s, up = tensors = operands(case)
    ends, window = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE) if packed else S, CASES[case][3]
    results = []
    for _ in range(2):
        inputs, _ = leaves(tensors)
        o = da.document_attention(*inputs[:3], ends, window=window, sinks=inputs[3] if s is not None else None)
        results.append([o.detach(), *torch.autograd.grad(o, inputs, up)])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    truth = reference_by_heads(q, k, v, s, up, ends, window)
    errors = {
        name: round(((a.float() - b).norm() / b.norm()).item(), 6)
        for name, a, b in zip(("o", "dq", "dk", "dv", "dsinks"), results[0], truth, strict=False)
    }
    return {"errors": errors, "same bits": same, "ok": same and max(errors.values()) < 1e-2}


def kinds_of(case):
    return ("forward", "dq", *(("dkdv",) if CASES[case][0] <= da.TOGETHER else ("dk", "dv")))


def main() -> None:
    global LIMIT
    LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else LIMIT
    context = mp.get_context("fork")  # of the imports above; CUDA begins in each
    jobs, done = context.Queue(), context.Queue()
    first = [(case, kind, None) for case in CASES for kind in kinds_of(case)]
    first += [(case, kind, None, True) for case in PACKED for kind in kinds_of(case) if S == SWEPT]
    first.sort(key=lambda job: -CASES[job[0]][0])  # the longest first
    hopper = da.architecture_of(torch.device("cpu"))  # without a word to CUDA, which begins in each process
    defaults = {(case, kind): tuple(da.tiles_of(kind, CASES[case][0], False, hopper, CASES[case][3]))
                for case, kind, *_ in first}  # fmt: skip
    sweep = [(case, kind, t) for case, kinds in SWEEPS.items() for kind, ts in kinds.items() for t in ts
             if t != defaults[case, kind] and S == SWEPT]  # fmt: skip
    for job in first + sweep:
        jobs.put(job)
    count = max(4, min(12, len(os.sched_getaffinity(0)) - 4))
    workers = [context.Process(target=compiler, args=(jobs, done), daemon=True) for _ in range(count)]
    for _ in workers:
        jobs.put(None)
    flexes = {}
    for case, (*_, wanted) in CASES.items():
        if wanted:
            here, there = context.Pipe()
            flexes[case] = (context.Process(target=flex_worker, args=(case, there), daemon=True), here)
    for process in [*workers, *(p for p, _ in flexes.values())]:
        process.start()
    finished = {}

    def compiled(*wanted, until=8.0):
        """Wait for jobs, and return what failed."""
        while not all(job in finished for job in wanted) and left() > until:
            try:
                job, error = done.get(timeout=0.2)
                finished[job] = error
            except queue.Empty:
                pass
        return "; ".join({finished.get(job, "not compiled in time") for job in wanted} - {""})

    import triton

    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "S": S}
    report |= {"checks": {}, "ms": {}, "tiles": {}, "defaults": {f"{c} {k}": t for (c, k), t in defaults.items()}}
    print(report["device"], "torch", torch.__version__, "triton", triton.__version__, f"S {S}", flush=True)

    def save(key, name, value):
        report[key][name] = value
        print(f"{NOW() - START:4.0f} s {key} {name}: {json.dumps(value)}", flush=True)
        with open(os.path.join(os.environ.get("OUT", "."), f"attention-{S}.json"), "w") as file:
            json.dump(report, file, indent=1)

    for case in sorted(CASES, key=lambda case: CASES[case][0]):  # those that compile fast first
        for packed in (False, True)[: 1 + (case in PACKED and S == SWEPT)]:
            compiled(*((case, kind, None, *(True,) * packed) for kind in kinds_of(case)), until=LIMIT - 40)
            if S != SWEPT:  # the kernels are the same
                continue
            try:
                found = check(case, packed)
            except Exception as error:
                found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
            save("checks", case + (", packed" if packed else ""), found)
            torch.cuda.empty_cache()
    for case, (D, *_, sinks, _) in CASES.items():
        row = {}
        names = ["ours", *(["eager"] if sinks else ["sdpa"]), *(["flash"] if D <= 256 and not sinks else [])]
        for name in names:
            try:
                ms, how = timed(step_of(name, case))
                row[name] = round(ms, 4)
                if how != "graph":
                    row[f"{name} was"] = how
            except Exception as error:
                row[name] = in_short(error)
            torch.cuda.empty_cache()
        if case in flexes:
            pipe = flexes[case][1]
            got = pipe.recv() if pipe.poll(max(0.0, min(10.0, left() - 25))) else "not compiled in time"
            if got == "ready":
                pipe.send("go")
                got = pipe.recv() if pipe.poll(8) else "timed out"
            row["flex"] = round(got[0], 4) if isinstance(got, tuple) else got
        save("ms", case, row)
        if left() < 5:
            break
    for case, kinds in SWEEPS.items() if S == SWEPT else ():
        for kind, candidates in kinds.items():
            row = {}
            for tiles in candidates:
                failed = compiled((case, kind, None if tiles == defaults[case, kind] else tiles), until=3)
                try:
                    row[str(tiles)] = failed or round(kernel_ms(launches_of(case, kind, tiles)), 4)
                except Exception as error:
                    row[str(tiles)] = in_short(error)
            best = min((x for x in row.items() if isinstance(x[1], float)), key=lambda x: x[1], default=None)
            save("tiles", f"{case} {kind}", {"best": best, **row})
            if left() < 2:
                break
        if left() < 2:
            break
    print(f"{NOW() - START:.0f} s: done", flush=True)
    os._exit(0)  # the processes die with it


if __name__ == "__main__":
    main()
