#!/usr/bin/env python3
"""Faults in worlds of any size, made from the steps of a real job: what each rank did alone, waiting worked
out anew.

    python tests/faults/offline.py                        # 5 seeds, 60 faults and 20 worlds without a fault
each
    python tests/faults/offline.py --record RUN 20:400    # take these steps of another run, without a fault
(and keep them)
"""

import argparse
import gzip
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import trace_tools  # noqa: E402
from simulate import simulate  # noqa: E402

RECORDED = HERE / "recorded.json.gz"
NUM_STEPS = 120


def record(run_dir, first, last):
    """{"own": per rank, per step, {phase: own microseconds}, in order; "transfer": per step, the least
    waiting}."""
    own, waits = [], Counter()
    for path in sorted(Path(run_dir, "structured_logs").glob("training.rank*.jsonl")):
        steps, stack, mark, ready = {}, [], None, False
        for line in path.read_text().splitlines():
            r = json.loads(line)
            if r["ph"] not in "BEi" or r.get("name") in ("heartbeat",
                                                         "process_end") or "tid" in r and r["ph"] != "i":
                continue
            spent, phase, step = r["ts"] - (mark or r["ts"]), stack[-1] if stack else None, r.get("step")
            mark = r["ts"]
            if phase is not None and phase["name"] not in ("step", "epoch") and step is not None:
                if phase.get("sync") and (ready or "ready" not in phase["tells"]) and r["ph"] == "E":
                    waits[step, len(own)] += spent
                else:
                    phases = steps.setdefault(step, {})
                    phases[phase["name"]] = phases.get(phase["name"], 0) + spent
            if r["ph"] == "B":
                stack.append({**r, "tells": {"ready"} if r["name"] == "backward" else set()})
                ready = False
            elif r["ph"] == "E":
                stack.pop()
            elif r["name"] == "ready":
                ready = True
        own.append(steps)
    common = sorted(s for s in set.intersection(*map(set, own)) if first <= s <= last)
    usual = Counter(frozenset(steps[s]) for steps in own for s in common).most_common(1)[0][0]
    common = [s for s in common if all(frozenset(steps[s]) >= usual for steps in own)]
    order = [phase for phase in own[0][common[0]] if phase in usual]
    return {"own": [[{phase: steps[s][phase] for phase in order} for s in common] for steps in own],
            "transfer": [min(waits[s, rank] for rank in range(len(own))) for s in common], "meet": "backward"}


class Recorded:
    """The recorded steps as a noise: world ranks out of few, each beginning at another step."""

    def __init__(self, seed, world):
        table = json.loads(gzip.decompress(RECORDED.read_bytes()))
        rng = random.Random(seed)
        self.own, self.transfer, self.meet = table["own"], table["transfer"], table["meet"]
        self.begins = [rng.randrange(len(self.own[0])) for _ in range(world)]
        self.phases = list(self.own[0][0])

    def __call__(self, rank, step, phase):
        steps = self.own[rank % len(self.own)]
        return steps[(self.begins[rank] + step) % len(steps)][phase]


def draw(rng):
    """(world, hosts, extra, answer: kinds, ranks, phase, first step, period) of a random fault."""
    world = rng.choice([2, 4, 8, 16, 64])
    recorded = Recorded(rng.random(), world)
    step_us = sum(recorded(0, 1, phase) for phase in recorded.phases)
    easy = rng.random() < 0.5
    us = 30_000 if easy else max(5000, step_us / 5)
    phase = rng.choice([p for p in recorded.phases if p != "fetch"])
    rank = rng.randrange(world)
    hosts = [f"node-{r * 4 // world}" for r in range(world)]
    kind = rng.choice(["straggler"] * 4 + ["from", "every", "once", "host", "two", "slowdown", "moving"])
    first, every, last, ranks = 1, 1, 1 << 30, [rank]
    answer = {"kind": ("straggler",), "ranks": [rank], "phase": phase}
    if kind == "from":
        first = rng.randrange(30, 90)
        answer["first"] = first
    elif kind == "every":
        every, us = rng.randrange(5, 15), 4 * us
        answer.update(kind=("burst",), period=every)
    elif kind == "once":
        first = last = rng.randrange(30, 100)
        us = 1_000_000
        answer.update(kind=("spike",), first=first)
    elif kind == "host" and world >= 8:
        host = rng.choice(hosts)
        ranks = [r for r in range(world) if hosts[r] == host]
        answer.update(kind=("slow_host",), ranks=ranks)
    elif kind == "two" and world > 4:
        ranks = sorted(rng.sample(range(world), 2))
        answer["ranks"] = ranks
        if all(hosts[r] == hosts[ranks[0]] for r in ranks) and hosts.count(hosts[ranks[0]]) == 2:
            answer["kind"] = ("slow_host",)
    elif kind == "slowdown":
        first, ranks, us = rng.randrange(40, 80), list(range(world)), max(us, step_us * 0.3)
        answer.update(kind=("slowdown",), ranks=None, first=first)
    elif kind == "moving":
        us = max(us, 0.3 * step_us)
        turns = [rng.randrange(world) for _ in range(NUM_STEPS + 1)]
        return world, hosts, recorded, lambda r, s, p: us * (p == phase and r == turns[s]), dict(
            answer, kind=("imbalance",), ranks=None)
    members = set(ranks)
    return world, hosts, recorded, lambda r, s, p: us * (
        p == phase and r in members and first <= s <= last and (s - first) % every == 0), answer


def verdict(folder, world, hosts, recorded, extra, mark):
    simulate(folder, world=world, num_steps=NUM_STEPS, hosts=hosts, recorded=recorded, extra=extra, mark=mark)
    return trace_tools.summarize(trace_tools.Run([str(folder)]).read())["findings"]


def fits(found, answer):
    head = found[0]
    return (head["kind"] in answer["kind"] and answer["ranks"] in (None, head["ranks"])
            and head["phase"] == answer["phase"]
            and ("first" not in answer or abs(head["steps"]["first"] - answer["first"]) <= 1)
            and ("period" not in answer or head["steps"]["period"] == answer["period"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", nargs=2, metavar=("RUN", "A:B"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--mark", default="ready", choices=["ready", "titan"])
    arguments = parser.parse_args()
    if arguments.record:
        table = record(arguments.record[0], *map(int, arguments.record[1].split(":")))
        RECORDED.write_bytes(gzip.compress(json.dumps(table, separators=(",", ":")).encode(), 9, mtime=0))
        return print(f"{len(table['own'])} ranks, {len(table['transfer'])} steps of "
                     f"{', '.join(table['own'][0][0])}")
    score = Counter()
    for seed in range(arguments.seeds):
        rng = random.Random(seed)
        for number in range(arguments.faults + arguments.clean):
            world, hosts, recorded, extra, answer = draw(rng)
            if number >= arguments.faults:
                extra, answer = None, {"kind": ("healthy", "opaque", "bound"), "ranks": None, "phase": None}
            with tempfile.TemporaryDirectory() as folder:
                found = verdict(Path(folder), world, hosts, recorded, extra, arguments.mark)
            if number >= arguments.faults:
                right = found[0]["kind"] in answer["kind"]
            else:
                right = fits(found, answer)
            score["fault" if extra else "clean", right] += 1
            if not right:
                print(f"WRONG seed {seed} world {world}: wanted {answer}, got "
                      f"{[(f['kind'], f['ranks'][:5], f['phase'], f['steps']) for f in found[:2]]}",
                      flush=True)
    print(f"{score['fault', True]} of {score['fault', True] + score['fault', False]} faults right, "
          f"{score['clean', False]} false alarms in {score['clean', True] + score['clean', False]} worlds "
          f"without a fault")


if __name__ == "__main__":
    main()
