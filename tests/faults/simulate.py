"""Traces of worlds that were never run: ranks that work, meet and wait, in our format or in torchtitan's.

    simulate(folder, world=64, num_steps=100, extra=lambda rank, step, phase: 30_000 * (rank == 5 and phase ==
"load"))
"""

import json
import random
from pathlib import Path

# microseconds; ranks meet at the end of "bwd"
PHASES = {"load": 2000, "fwd": 11_000, "bwd": 17_000, "opt": 1000}


def simulate(folder, world=4, num_steps=100, extra=None, phases=None, meet="bwd", mark="ready",
             noise="white", noise_us=300,
             transfer_us=2000, hosts=None, seed=0, boot_ids=None, shifts=None, end="ok", sizes=None,
             scale=None, device=None,
             recorded=None, agree_every=0):
    """Write one trace a rank. extra(rank, step, phase): microseconds more. mark: ready, sync (no ready),
    none, or titan (torchtitan's format). noise: white, lognormal, slow (AR 0.97). hosts: one for each rank;
    shifts: of wall clocks, us. scale(rank): factor of a rank's own work. device(rank, step): own and waiting
    microseconds that a device's events told. recorded(rank, step, phase): own microseconds of a real job, in
    place of phases and noise (see offline.py). agree_every: ranks meet once more, at the end of every so
    manyth step. Returns the folder."""
    folder = Path(folder)
    (folder / "structured_logs").mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    phases = phases or (dict.fromkeys(recorded.phases, 0) if recorded else PHASES)
    meet = recorded.meet if recorded else meet
    hosts = hosts or ["node-a"] * world
    lines = [[] for _ in range(world)]
    begin = 1_700_000_000_000_000
    clock = [begin + rng.randrange(2000) for _ in range(world)]
    slow = [0.0] * world
    for rank in range(world):
        shift = (shifts or {}).get(rank, 0)
        if mark != "titan":
            lines[rank].append({"ph": "M", "v": 1, "ts": clock[rank] + shift, "mono_us": clock[rank] - begin,
                                "rank": rank,
                                "boot_id": (boot_ids or {}).get(rank, hosts[rank]), "world_size": world,
                                "host": hosts[rank],
                                "pid": 1000 + rank, "source": "training", "worker": None, "run": "sim",
                                "attempt": 0,
                                "heartbeat_s": 5, "stall_timeout_s": 120})

    def write(rank, ph, name, step, **fields):
        lines[rank].append({"ph": ph, "ts": round(clock[rank]) + (shifts or {}).get(rank, 0), "name": name,
                            "step": step, **fields})

    order = list(phases)
    for step in range(1, num_steps + 1):
        arrive = [0.0] * world
        for index, phase in enumerate(order):
            starts = []
            for rank in range(world):
                jitter = {"white": rng.gauss(0, noise_us), "lognormal": noise_us
                          * rng.lognormvariate(0, 1)}.get(noise, 0.0)
                if noise == "slow":
                    slow[rank] = 0.97 * slow[rank] + rng.gauss(0, noise_us)
                    jitter = slow[rank] / len(order)
                if recorded:
                    jitter = recorded(rank, step, phase)
                own = phases[phase] * (scale(rank) if scale else 1.0) + (extra(rank, step, phase) if extra
                                                                         else 0) + jitter
                write(rank, "B", phase, step,
                      **({"sync": True} if phase == meet and mark in ("ready", "sync") else {}))
                starts.append(clock[rank])
                clock[rank] += max(own, 5)
                if phase == meet:
                    arrive[rank] = clock[rank]
                    if mark == "ready":
                        write(rank, "i", "ready", step)
            if phase == meet:
                release = max(arrive) + (recorded.transfer[step % len(recorded.transfer)] if recorded
                                         else transfer_us)
                clock[:] = [release + rng.uniform(0, 50) for _ in range(world)]
            for rank in range(world):
                write(rank, "E", phase, step, dur=round(clock[rank]) - round(starts[rank]))
                clock[rank] += 20
            if device and phase == meet:
                for rank in range(world):
                    own_us, wait_us = device(rank, step)
                    lines[rank].append({"ph": "C", "ts": round(clock[rank]), "step": step,
                                        "args": {"device_own_us": own_us, "device_wait_us": wait_us}})
            if agree_every and step % agree_every == 0 and phase == order[-1]:
                together = max(clock) + 30
                for rank in range(world):
                    start = clock[rank]
                    write(rank, "B", "agree", step, sync=True)
                    clock[rank] = together
                    write(rank, "E", "agree", step, dur=round(together) - round(start))
            if sizes and index == 0:
                for rank in range(world):
                    lines[rank].append({"ph": "C", "ts": round(clock[rank]), "step": step,
                                        "args": {"batch_samples": sizes(rank)}})
    for rank in range(world):
        if mark == "titan":
            save_titan(folder, rank, lines[rank], hosts[rank])
            continue
        if end:
            write(rank, "i", "process_end", num_steps, args={"how": end})
        path = folder / "structured_logs" / f"training.rank{rank:05d}.20260101T000000.{1000 + rank}.jsonl"
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines[rank]))
    return folder


def save_titan(folder, rank, lines, host):
    path = folder / "structured_logs" / f"training.global_rank_{rank}.20260101-000000-AAAAAA.jsonl"
    with open(path, "w") as file:
        for number, line in enumerate(lines):
            record = {"rank": rank, "global_rank": rank, "local_rank": rank, "source": "training",
                      "host_name": host,
                      "pid": 1000 + rank, "tid": 1000 + rank, "step": line["step"], "time_us": line["ts"],
                      "seq_id": number,
                      "log_type": "event", "caller": "loop.py:1:step",
                      "log_type_name": line["name"] + {"B": "_start", "E": "_end"}[line["ph"]]}
            if line["ph"] == "E":
                record["value"] = line["dur"] / 1000
            file.write(json.dumps(record) + "\n")


def simulate_pipeline(folder, stages=(10_000, 20_000, 20_000, 14_000), replicas=1, num_steps=80, extra=None,
                      seed=0):
    """A pipeline of stages that differ by design, each waiting for its neighbours; replicas of it meet once a
    step."""
    folder = Path(folder) / "structured_logs"
    folder.mkdir(parents=True, exist_ok=True)
    rng, depth = random.Random(seed), len(stages)
    world = depth * replicas
    begin = 1_700_000_000_000_000
    clock = [begin] * world
    lines = [[{"ph": "M", "v": 1, "ts": begin, "mono_us": 0, "boot_id": "b", "rank": rank,
               "world_size": world, "host": "node-a",
               "pid": 1000 + rank, "source": "training", "worker": None, "run": "sim", "attempt": 0,
               "heartbeat_s": 5,
               "stall_timeout_s": 120}] for rank in range(world)]

    def span(rank, name, step, own_us, until=None):
        start = clock[rank]
        lines[rank].append({"ph": "B", "ts": start, "name": name, "step": step,
                            **({} if until is None else {"sync": True})})
        clock[rank] = max(start + 5, until or 0) + max(round(own_us), 10)
        lines[rank].append({"ph": "E", "ts": clock[rank], "name": name, "step": step,
                            "dur": clock[rank] - start})
        clock[rank] += 10

    def work(rank, name, step, share):
        more = extra(rank, step, name) if extra else 0
        span(rank, name, step, stages[rank % depth] * share + rng.gauss(0, 200) + more)

    for step in range(1, num_steps + 1):
        for first in range(0, world, depth):
            sent = 0
            for rank in range(first, first + depth):
                if rank > first:
                    span(rank, "recv_forward", step, 100, sent)
                work(rank, "forward", step, 1 / 3)
                sent = clock[rank]
            for rank in reversed(range(first, first + depth)):
                if rank < first + depth - 1:
                    span(rank, "recv_backward", step, 100, sent)
                work(rank, "backward", step, 2 / 3)
                sent = clock[rank]
        together = max(clock) + 500
        for rank in range(world):
            span(rank, "grad_reduce", step, 20, together)
            span(rank, "optimizer", step, 900)
    for rank in range(world):
        lines[rank].append({"ph": "i", "ts": clock[rank], "name": "process_end", "args": {"how": "ok"}})
        path = folder / f"training.rank{rank:05d}.20260101T000000.{1000 + rank}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[rank]))
    return folder.parent
