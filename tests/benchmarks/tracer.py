"""What a span costs: tracing.py beside logging, viztracer, OpenTelemetry and torchtitan, and in training.

    python tests/benchmarks/tracer.py              # microseconds a call, each contender in its own process
    python tests/benchmarks/tracer.py --training   # step time of a 2-rank DDP job, tracing on against off
    python tests/benchmarks/tracer.py --heartbeat  # what the heartbeat thread costs a core

Contenders that are not installed are left out. Only ratios within one run mean something: the times depend on
the machine. Blocks of calls alternate between the contenders; the figures are medians over the blocks.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TEN = {f"value_{i}": i * 1.1 for i in range(10)}


# ---- The contenders: functions of a folder that return {case: (block of calls, number of calls)} ----

def spans(log_trace_span, num_calls):
    """One named span around nothing, as a context manager: what a training step does."""
    def block():
        for _ in range(num_calls):
            with log_trace_span("forward"):
                pass
    return block, num_calls


def decorated(log_trace_span, num_calls):
    @log_trace_span("forward")
    def nothing():
        pass

    def block():
        for _ in range(num_calls):
            nothing()
    return block, num_calls


def scalars(log_trace_scalar, values, num_calls):
    def block():
        for _ in range(num_calls):
            log_trace_scalar(values)
    return block, num_calls


def threads(log_trace_span, num_calls):
    """The same spans from four threads at once."""
    run, _ = spans(log_trace_span, num_calls // 4)

    def block():
        workers = [threading.Thread(target=run) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return block, num_calls


def cases(span, scalar, num_calls):
    return {"span": spans(span, num_calls), "decorator": decorated(span, num_calls),
            "1 scalar": scalars(scalar, {"loss": 1.25},
                                num_calls), "10 scalars": scalars(scalar, TEN, num_calls),
            "span, 4 threads": threads(span, num_calls)}


def ours(folder):
    import tracing
    tracing.init_structured_logger("bench", folder, max_file_size_mb=64, backup_count=1)
    tracing.set_step(100)
    runs = cases(tracing.log_trace_span, tracing.log_trace_scalar, 2000)
    runs["span with args"] = args_span(tracing.log_trace_span, 2000)
    runs.update(hooks(tracing.log_trace_span, 2000))
    return runs


def ours_off(folder):
    import tracing
    return {"span, off": spans(tracing.log_trace_span, 20000),
            "10 scalars, off": scalars(tracing.log_trace_scalar, TEN, 20000)}


def args_span(log_trace_span, num_calls):
    def block():
        for i in range(num_calls):
            with log_trace_span("forward", args={"tokens": i}):
                pass
    return block, num_calls


def hooks(log_trace_span, num_calls):
    """A hook's call with trace_hooks: the span's name is put together at each call, as a dispatcher does."""
    def call(hook, event):
        with log_trace_span(f"{hook}.{event}"):
            pass

    def block():
        for _ in range(num_calls):
            call("GradientNormLogger", "after_step")
    return {"hook call (trace_hooks)": (block, num_calls)}


def torchtitan(folder):
    from torchtitan.observability import structured_logger as logger
    logger.init_structured_logger("bench", folder)
    logger.set_step(100)
    return cases(logger.log_trace_span, logger.log_trace_scalar, 400)


def torchtitan_off(folder):
    from torchtitan.observability import structured_logger as logger
    logger.init_structured_logger("bench", folder, enable=False)
    return {"span, off": spans(logger.log_trace_span, 20000),
            "10 scalars, off": scalars(logger.log_trace_scalar, TEN, 20000)}


def python_logging(folder):
    """The shortest thing that writes a begin and an end with the standard library's logging."""
    import contextlib
    import logging

    class Json(logging.Formatter):
        def format(self, record):
            place = f"{record.filename}:{record.lineno}"
            return json.dumps({"ts": int(record.created * 1e6), "ph": record.msg, "name": record.args[0],
                               "step": record.args[1], "tid": record.thread, "place": place})

    handler = logging.FileHandler(os.path.join(folder, "logging.jsonl"))
    handler.setFormatter(Json())
    logger = logging.getLogger("bench")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    @contextlib.contextmanager
    def span(name):
        logger.info("B", name, 100)
        yield
        logger.info("E", name, 100)
    return {"span": spans(span, 1000), "span, 4 threads": threads(span, 1000)}


def viztracer(folder):
    """log_event: nothing is on disk before the process ends; its buffer holds the last million entries."""
    from viztracer import VizTracer
    tracer = VizTracer(log_sparse=True, verbose=0, output_file=os.path.join(folder, "viz.json"))
    tracer.start()
    return {"span": spans(tracer.log_event, 2000)}


def opentelemetry(folder):
    """The SDK's span, written to a file when it ends."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    provider = TracerProvider()
    out = open(os.path.join(folder, "otel.jsonl"), "w")
    provider.add_span_processor(SimpleSpanProcessor(
        ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")))
    return {"span": spans(provider.get_tracer("bench").start_as_current_span, 200)}


CONTENDERS = {"tracing.py": (ours, None), "tracing.py, off": (ours_off, None),
              "torchtitan": (torchtitan, "torchtitan"),
              "torchtitan, off": (torchtitan_off, "torchtitan"), "logging + JSON": (python_logging, None),
              "viztracer": (viztracer, "viztracer"), "OpenTelemetry": (opentelemetry, "opentelemetry")}


def serve(name):
    """A contender's process: runs the case that a line of stdin names, answers with microseconds a call."""
    folder = tempfile.mkdtemp(prefix="bench_", dir=os.environ.get("BENCH_DIR"))
    runs = CONTENDERS[name][0](folder)
    print(json.dumps(sorted(runs)), flush=True)
    for line in sys.stdin:
        block, num_calls = runs[line.strip()]
        start_s = time.perf_counter()
        block()
        print((time.perf_counter() - start_s) / num_calls * 1e6, flush=True)


def compare(num_rounds):
    """Ask all contenders in turns. Returns {case: {contender: [microseconds a call, one a round]}}."""
    with tempfile.TemporaryDirectory() as folder:
        found = [name for name, (_, module) in CONTENDERS.items()
                 if module is None or importlib.util.find_spec(module)]
        env = {**os.environ, "BENCH_DIR": folder}
        workers = {name: subprocess.Popen([sys.executable, __file__, "--serve", name], text=True, env=env,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) for name in found}
        offers = {name: json.loads(worker.stdout.readline()) for name, worker in workers.items()}
        times = {}
        for round_ in range(num_rounds + 1):
            for name, worker in workers.items():
                for case in offers[name]:
                    worker.stdin.write(case + "\n")
                    worker.stdin.flush()
                    answer_us = float(worker.stdout.readline())
                    if round_:   # the first is warm-up
                        times.setdefault(case, {}).setdefault(name.replace(", off", ""), []).append(answer_us)
        for worker in workers.values():
            worker.stdin.close()
            worker.wait(30)
        return times, bytes_a_span(folder)


def bytes_a_span(folder):
    """Bytes that the begin and the end of a span without args, task and thread take in tracing.py's file."""
    sizes = {}
    for path in Path(folder).rglob("bench.rank*.jsonl*"):  # rotated parts too: each has some of the cases
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["ph"] in "BE" and record["name"] == "forward" and not {"tid", "args"} & set(record):
                sizes[record["ph"]] = len(line) + 1
    return sum(sizes.values())


def print_spans(num_rounds):
    times, size = compare(num_rounds)
    print(f"{'microseconds a call':<28}{'tracing.py':>12}{'':4}others (and how many times as much)")
    for case, by_name in sorted(times.items()):
        mine = statistics.median(by_name["tracing.py"])
        others = []
        for name, values in by_name.items():
            if name != "tracing.py":   # the ratio of each round: the machine's speed changes between them
                ratio = statistics.median(b / a for a, b in zip(by_name["tracing.py"], values))
                others.append(f"{name} {statistics.median(values):.2f} ({ratio:.1f})")
        print(f"{case:<28}{mine:>12.3f}{'':4}{', '.join(others)}")
    print(f"bytes a span: {size}")


# ---- In training ----

def train(num_blocks, steps_a_block):
    """One rank of a DDP job whose blocks of steps have tracing off, on, on without heartbeats, in turns."""
    import torch
    import tracing
    from torch.nn.parallel import DistributedDataParallel
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, folder = torch.distributed.get_rank(), os.environ["BENCH_DIR"]
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch, engine = torch.randn(128, 256), torch.autograd.Variable._execution_engine

    def step():
        with tracing.log_trace_span("step"):
            with tracing.log_trace_span("data"):
                time.sleep(0.004)
            with tracing.log_trace_span("to_device"):
                x = batch.clone()
            with tracing.log_trace_span("forward"):
                loss = model(x).square().mean()
            with tracing.log_trace_span("backward", sync=True) as span:
                loss.register_hook(lambda grad: engine.queue_callback(span.ready))
                loss.backward()
            with tracing.log_trace_span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            with tracing.log_trace_span("log"):
                tracing.log_trace_scalar({"batch_size": len(x), "loss": 1.0})

    modes = {"off": None, "on": 5, "on, no heartbeat": 0}
    times = {mode: [] for mode in modes}
    for block in range(num_blocks + 1):
        for mode in sorted(modes, key=lambda m: (list(modes).index(m) + block) % 3):
            if modes[mode] is not None:
                tracing.init_structured_logger(f"b{block}{mode[-4:]}".replace(" ", ""), folder,
                                               heartbeat_s=modes[mode])
            for _ in range(2):   # a file's first step also defines its names
                step()
            torch.distributed.barrier()
            start_s = time.perf_counter()
            for i in range(steps_a_block):
                tracing.set_step(i)
                step()
            torch.distributed.barrier()
            if block:
                times[mode].append((time.perf_counter() - start_s) / steps_a_block * 1e3)
            tracing.close_structured_logger()
    if rank == 0:
        base = statistics.median(times["off"])
        print(f"step {base:.2f} ms with tracing off; {num_blocks} blocks of {steps_a_block} steps each way")
        for mode in ("on", "on, no heartbeat"):
            ratios = [100 * (on / off - 1) for on, off in zip(times[mode], times["off"])]
            low, high = confidence(ratios)
            middle = statistics.median(ratios)
            print(f"{mode}: {middle:+.2f} per cent of a step (95 % confidence {low:+.2f} to {high:+.2f})")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def confidence(values):
    """The 95 per cent confidence interval of the median, by order statistics."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(values) - 1) / 2
    return ordered[max(0, int(middle - half))], ordered[min(len(values) - 1, int(middle + half + 1))]


def print_training(num_blocks, steps_a_block):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                   __file__,
                   "--train", "--blocks", str(num_blocks), "--steps", str(steps_a_block)]
        subprocess.run(command, check=True, env={**os.environ, "BENCH_DIR": folder, "OMP_NUM_THREADS": "1"})


def print_heartbeat(seconds):
    """CPU time of a process that sleeps, with a beat every 50 ms against none, scaled to one in 5 s."""
    import tracing
    with tempfile.TemporaryDirectory() as folder:
        cpu_s = {}
        for heartbeat_s in (0.05, 0):
            tracing.init_structured_logger("beat", folder, heartbeat_s=heartbeat_s,
                                           stall_timeout_s=100 if heartbeat_s else 0)
            start_s = time.process_time()
            time.sleep(seconds)
            cpu_s[heartbeat_s] = time.process_time() - start_s
            tracing.close_structured_logger()
    beat_us = (cpu_s[0.05] - cpu_s[0]) / (seconds / 0.05) * 1e6
    percent = beat_us / 5e6 * 100
    print(f"a heartbeat takes {beat_us:.0f} us of CPU time: {percent:.4f} per cent of a core at one in 5 s")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30,
                        help="blocks of calls for each contender (default 30)")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--heartbeat", action="store_true")
    parser.add_argument("--blocks", type=int, default=300,
                        help="blocks of steps each way, with --training (default 300)")
    parser.add_argument("--steps", type=int, default=10, help="steps a block, with --training (default 10)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.train:
        train(options.blocks, options.steps)
    elif options.training:
        print_training(options.blocks, options.steps)
    elif options.heartbeat:
        print_heartbeat(20)
    else:
        print_spans(options.rounds)


if __name__ == "__main__":
    main()
