"""How fast and in how much memory trace_tools reads: against a bare json.loads loop and torchtitan's trace
generator.

    python tests/benchmarks/scale.py [--records 1500000] [--repeats 3]

Synthetic traces of 1 to 64 ranks with about the same number of records in all, 18 a rank and step as train.py
writes them. Each measurement is a process of its own; the competitors take turns, and medians are shown.
Rates are records a second of CPU time: the loop is `for line in file: keep.append(json.loads(line))`, which
works out nothing; summarize reads, judges and renders. torchtitan's generator reads its own format (a tenth
of the records, in 64 files at most). Memory is the peak of the process, with at most 256 files open; its
limit is 150 MB plus 32 bytes per rank and step.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
RECORDS_A_STEP = 18


def write_ours(folder, num_ranks, num_steps):
    from trace_parts import T0, Trace
    for rank in range(num_ranks):
        source = random.Random(rank)
        trace = Trace(rank, world_size=num_ranks, host=f"node-{rank // 8}", boot_id=f"b{rank // 8}", ts=rank)
        with open(folder / trace.name(), "w") as file:
            file.write(trace.text())
            at = T0 + 1000
            file.write(f'{{"ph":"B","ts":{at},"name":"epoch"}}\n')
            for step in range(1, num_steps + 1):
                lines, at = step_lines(source, step, at)
                file.write("".join(lines))
            file.write(f'{{"ph":"i","ts":{at},"name":"process_end","args":{{"how":"ok"}}}}\n')


def step_lines(source, step, at):
    """One step of train.py's spans, as tracing.py writes them: spans that take 25 ms with some noise."""
    begin, lines = at, [f'{{"ph":"B","ts":{at},"name":"step","step":{step}}}\n']
    for name, us in (("data", 1500), ("to_device", 90), ("forward", 9000), ("backward", 8500), ("hooks", 120),
                     ("optimizer", 1500), ("log", 200)):
        at += source.randrange(20)
        since, sync = at, ',"sync":true' if name == "backward" else ""
        lines.append(f'{{"ph":"B","ts":{at},"name":"{name}","step":{step}{sync}}}\n')
        at += int(us * source.uniform(0.9, 1.3))
        if sync:
            lines.append(f'{{"ph":"i","ts":{at},"name":"ready","step":{step},"args":{{"span":"backward"}}}}\n')
            at += 2500
        lines.append(f'{{"ph":"E","ts":{at},"name":"{name}","step":{step},"dur":{at - since}}}\n')
    lines.append(f'{{"ph":"C","ts":{at},"step":{step},"args":{{"num_samples":16,"num_tokens":2048}}}}\n')
    if step % 200 == 0:
        lines.append(f'{{"ph":"i","ts":{at},"name":"heartbeat","step":{step},"args":{{"rss_mb":800.5,"idle_s":0.1,"lost":0}}}}\n')
    lines.append(f'{{"ph":"E","ts":{at},"name":"step","step":{step},"dur":{at - begin}}}\n')
    return lines, at


def write_torchtitan(folder, num_ranks, num_records):
    from trace_parts import torchtitan_line, torchtitan_name
    for rank in range(num_ranks):
        with open(folder / torchtitan_name(rank), "w") as file:
            for number in range(num_records // num_ranks // 2):
                at, step = number * 1000, number // 8 + 1
                file.write(torchtitan_line(rank, 2 * number, at, "fwd_bwd_start", step=step) + "\n")
                file.write(torchtitan_line(rank, 2 * number + 1, at + 900, "fwd_bwd_end", step=step,
                                           value=0.9) + "\n")


# ---- What is measured, each in a process of its own


def loop(folder):
    keep = []
    for path in sorted(folder.iterdir()):
        with open(path) as file:
            for line in file:
                keep.append(json.loads(line))
    return len(keep)


def summarize(folder):
    import trace_tools
    sys.stdout, out = open(os.devnull, "w"), sys.stdout
    trace_tools.main(["summarize", str(folder)])
    sys.stdout = out
    return count_lines(folder)


def export(folder):
    import trace_tools
    sys.stdout, out = open(os.devnull, "w"), sys.stdout
    trace_tools.main(["export", str(folder), "-o", str(folder.parent / "exported.json")])
    sys.stdout = out
    return count_lines(folder)


def torchtitan(folder):
    from torchtitan.observability.structured_logger.gantt_generator import generate_gantt_trace
    begin = time.process_time()
    generate_gantt_trace(str(folder), str(folder.parent / "generated.json"))
    return count_lines(folder), time.process_time() - begin  # without the import of torch


def count_lines(folder):
    return sum(path.read_bytes().count(b"\n") for path in folder.iterdir())


def child(what, folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    begin = time.process_time()
    result = globals()[what](Path(folder))
    spent_s = time.process_time() - begin
    records, spent_s = result if isinstance(result, tuple) else (result, spent_s)
    print(json.dumps({"rate": records / spent_s,
                      "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def measure(what, folder):
    done = subprocess.run([sys.executable, __file__, "--child", what, str(folder)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=int, default=1_500_000, help="in all files together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", default="1,8,64")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(*arguments.child)
    root = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        print(f"{'ranks':>5} {'steps':>7} {'records':>10} | {'json loop':>10} {'summarize':>10} {'ratio':>6} {'torchtitan':>10} "
              f"{'ratio':>6} | {'export':>9} | {'summarize':>9} {'export':>9} {'limit':>9}")
        for num_ranks in map(int, arguments.ranks.split(",")):
            row(root / str(num_ranks), num_ranks, arguments.records // num_ranks // RECORDS_A_STEP,
                arguments.repeats)
    finally:
        shutil.rmtree(root)


def row(root, num_ranks, num_steps, repeats):
    ours, titans = root / "structured_logs", root / "titan"
    ours.mkdir(parents=True), titans.mkdir()
    write_ours(ours, num_ranks, num_steps)
    records = num_ranks * num_steps * RECORDS_A_STEP
    write_torchtitan(titans, num_ranks, records // 10)
    found = {}
    for _ in range(repeats):  # the competitors take turns, so that a busy machine slows all of them down
        for what, folder in (("loop", ours), ("summarize", ours), ("torchtitan", titans), ("export", ours)):
            result = measure(what, folder)
            if result is not None:
                found.setdefault(what, []).append(result)
    middle = {what: statistics.median(r["rate"] for r in results) for what, results in found.items()}
    peak = {what: max(r["mb"] for r in results) for what, results in found.items()}
    ratio = statistics.median(a["rate"] / b["rate"] for a, b in zip(found["summarize"], found["loop"]))
    other = statistics.median(a["rate"] / b["rate"] for a,
                              b in zip(found["summarize"], found["torchtitan"])) \
        if "torchtitan" in found else None
    limit_mb = 150 + 32 * num_ranks * num_steps / 2**20
    print(f"{num_ranks:>5} {num_steps:>7,} {records:>10,} | {middle['loop']:>10,.0f} {middle['summarize']:>10,.0f} {ratio:>6.2f} "
          + (f"{middle['torchtitan']:>10,.0f} {other:>6.1f}" if other else f"{'-':>10} {'-':>6}")
          + f" | {middle['export']:>9,.0f} | {peak['summarize']:>6.0f} MB {peak['export']:>6.0f} MB {limit_mb:>6.0f} MB", flush=True)


if __name__ == "__main__":
    main()
