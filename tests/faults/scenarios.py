"""The table of the fault suite: what is broken, and what the verdict must be. run.py runs it, test_faults.py
asserts it.

Faults of one model share a job: each has SEGMENT steps of its own, with steps without a fault in between,
against which the predicted saving is measured. Ends and stalls have a job each. Another seed moves faults to
other ranks, and what happens at one step to another step.
"""

import copy

SEGMENT = 90  # steps of a fault; the verdict sees these alone (--steps A:B)
EASY_MS, HARD_MS = 30, 8


class Slow:
    """A fault that makes steps slower: its place and size, and the answer."""

    def __init__(self, name, kind, faults, ranks=None, phase=None, first=None, period=None, also=(),
                 hosts=(), moves=True):
        self.name, self.kind, self.ranks, self.phase, self.hosts = name, kind, ranks, phase, list(hosts)
        self.faults, self.first, self.period, self.also, self.moves = faults, first, period, also, moves


def sleep(place, ranks=None, ms=EASY_MS, **more):
    return {"place": place, "what": "sleep", "ms": ms, **({} if ranks is None else {"ranks": ranks}), **more}


PHASES = {"data": "data", "to_device": "to_device", "forward": "forward", "backward_first": "backward",
          "backward_middle": "backward", "backward_last": "backward", "optimizer": "optimizer",
          "hook": "hooks", "gap": "step"}


def moved(case, seed, world):
    """The case with its faults on other ranks, and its answer."""
    if not case.moves or not seed:
        return case

    def turn(ranks):
        return None if ranks is None else sorted((rank + seed) % world for rank in ranks)

    case = copy.copy(case)
    case.ranks = turn(case.ranks)
    case.faults = [{**f, "ranks": turn(f["ranks"])} if "ranks" in f else f for f in case.faults]
    if isinstance(case, Stop):
        by = 3 * seed
        case.step = None if case.step is None else case.step + by
        case.faults = [{**f, "steps": [s + by for s in f["steps"]]} if "steps" in f else f
                       for f in case.faults]
    else:
        case.also = [(turn(ranks), phase) for ranks, phase in case.also]
    return case


def stragglers(ranks):
    """A slow rank in each part of a step: some ranks easy, some hard."""
    found = []
    for number, (place, phase) in enumerate(PHASES.items()):
        rank = ranks[number % len(ranks)]
        found.append(Slow(f"{place}_rank{rank}", "straggler", [sleep(place, [rank])], [rank], phase))
        hard = ranks[(number + 1) % len(ranks)]
        found.append(Slow(f"{place}_rank{hard}_hard", "straggler", [sleep(place, [hard], HARD_MS)], [hard],
                          phase))
    return found


def steps(first=0, last=SEGMENT - 1):
    return [first, last]


TWO = [
    Slow("nothing", "healthy", []),
    *stragglers([1, 0]),
    Slow("nothing_again", "healthy", []),
    Slow("slow_log_rank0", "burst", [sleep("log", [0], 120)], [0], "hooks", period=10, moves=False),
    Slow("from_step_45", "straggler", [sleep("forward", [1], steps=steps(45))], [1], "forward", first=45),
    Slow("every_7_steps", "burst", [sleep("data", [1], 60, every=7)], [1], "data", period=7),
    Slow("every_10_steps_rank0", "burst", [sleep("hook", [0], 120, every=10)], [0], "hooks", period=10),
    Slow("once", "spike", [sleep("backward_middle", [1], 1500, steps=steps(50, 50))], [1], "backward",
         first=50),
    Slow("recovered_after_20_s", "spike", [sleep("data", [1], 20_000, steps=steps(40, 40))], [1], "data",
         first=40),
    Slow("warm_up_rank1", "healthy", [sleep("forward", [1], 400, steps=steps(0, 2))]),
    Slow("warm_up_all", "healthy", [sleep("forward", ms=400, steps=steps(0, 2))]),
    Slow("garbage_collection_at_the_same_step", "healthy", [sleep("hook", ms=60, every=20)]),
    Slow("all_slow_data", "bound", [sleep("data")], None, "data"),
    Slow("all_slow_hook", "bound", [sleep("hook")], None, "hooks"),
    Slow("all_slower_from_step_40", "slowdown", [sleep("forward", ms=20, steps=steps(40))], None, "forward",
         first=40),
    Slow("nothing_in_the_end", "healthy", []),
]

FOUR = [
    Slow("nothing", "healthy", []),
    *stragglers([2, 0, 3, 1]),
    Slow("nothing_again", "healthy", []),
    Slow("two_ranks", "straggler", [sleep("data", [1, 2])], [1, 2], "data"),
    Slow("most_ranks", "straggler", [sleep("forward", [0, 1, 3])], [0, 1, 3], "forward"),
    Slow("masked", "straggler", [sleep("forward", [3], 40), sleep("data", [1], 15)], [3], "forward",
         also=[([1], "data")]),
    Slow("another_each_step", "imbalance", [sleep("data", turn=True)], None, "data"),
    Slow("from_step_50", "straggler", [sleep("backward_first", [2], steps=steps(50))], [2], "backward",
         first=50),
    Slow("every_5_steps", "burst", [sleep("optimizer", [3], 50, every=5)], [3], "optimizer", period=5),
    Slow("once", "spike", [sleep("to_device", [0], 1500, steps=steps(33, 33))], [0], "to_device", first=33),
    Slow("range_of_steps", ("burst", "straggler"), [sleep("data", [2], 40, steps=steps(30, 59))], [2],
         "data", first=30),
    Slow("all_slow_data", "bound", [sleep("data")], None, "data"),
    Slow("nothing_in_the_end", "healthy", []),
]


class SlowJob:
    """One model, one setting or one loop (of loop.py): processes of a host, and their cases."""

    def __init__(self, nproc, cases, overrides=(), hosts=(), loop=None):
        self.nproc, self.cases, self.overrides, self.hosts, self.loop = nproc, cases, overrides, hosts, loop

    def world(self):
        return self.nproc * max(len(self.hosts), 1)


SLOW_JOBS = {
    "two": SlowJob(2, TWO),
    "four": SlowJob(4, FOUR),
    "own_loop": SlowJob(3, loop="tracing", cases=[
        Slow("nothing", "healthy", []),
        Slow("get_rank2", "straggler", [sleep("data", [2])], [2], "get"),
        Slow("model_rank0_hard", "straggler", [sleep("forward", [0], HARD_MS)], [0], "model"),
        Slow("grads_rank1", "straggler", [sleep("backward_middle", [1])], [1], "grads"),
        Slow("grads_rank2_hard", "straggler", [sleep("backward_first", [2], HARD_MS)], [2], "grads"),
        Slow("update_rank0", "straggler", [sleep("optimizer", [0])], [0], "update"),
        Slow("between_spans_rank1_hard", "straggler", [sleep("gap", [1], HARD_MS)], [1], "step"),
        Slow("all_slow_get", "bound", [sleep("data")], None, "get")]),
    # What torchtitan's spans cannot tell must not be told.
    "torchtitan": SlowJob(3, loop="torchtitan", cases=[
        Slow("nothing", ("healthy", "opaque"), []),
        Slow("fetching_batch_rank1", "straggler", [sleep("data", [1])], [1], "fetching_batch"),
        Slow("fetching_batch_rank2_hard", "straggler", [sleep("data", [2], HARD_MS)], [2], "fetching_batch"),
        Slow("optim_rank0", "straggler", [sleep("optimizer", [0])], [0], "optim"),
        Slow("optim_every_7_steps", "burst", [sleep("optimizer", [2], 60, every=7)], [2], "optim", period=7),
        Slow("backward_rank2", "opaque", [sleep("backward_middle", [2])], None, "fwd_bwd")]),
    "norm": SlowJob(4, overrides=["model.norm=true"], cases=[
        Slow("nothing", "healthy", []),
        Slow("data_rank1", "straggler", [sleep("data", [1])], [1], "data"),
        Slow("data_rank0", "straggler", [sleep("data", [0])], [0], "data"),
        Slow("backward_rank2_hard", "straggler", [sleep("backward_middle", [2], HARD_MS)], [2], "backward")]),
    "hosts": SlowJob(2, hosts=["node-a", "node-b"], cases=[
        Slow("nothing", "healthy", []),
        Slow("slow_host", "slow_host", [sleep("forward", [2, 3], 20)], [2, 3], "forward", hosts=["node-b"],
             moves=False),
        Slow("one_rank_of_a_host", "straggler", [sleep("data", [3])], [3], "data", hosts=["node-b"],
             moves=False)]),
    "accumulate": SlowJob(2, overrides=["accumulate=2"], cases=[
        Slow("nothing", "healthy", []),
        Slow("forward_rank1", "straggler", [sleep("forward", [1])], [1], "forward"),
        Slow("backward_rank0", "straggler", [sleep("backward_middle", [0])], [0], "backward")]),
    "bigger_batches": SlowJob(
        4, overrides=["model.by_samples=4", "train_data.more_on_rank=2", "train_data.more=2"],
        cases=[Slow("bigger_batches_rank2", "straggler", [], [2], "backward", moves=False)]),
    "network": SlowJob(2, overrides=["hooks.Meeting={target: 'parts.py:Meeting', slow_ms: 18}"], cases=[
        Slow("slow_network", "bound", [], None)]),
    "pauses": SlowJob(2, overrides=["save_every=30", "eval_every=45",
                                    "val_data={target: 'parts.py:make_loader', num_samples: 32}"], cases=[
        Slow("checkpoints_and_evaluations", "healthy", []),
        Slow("slow_evaluation_rank1", "healthy", [sleep("evaluate", [1], 400)])]),
    "meetings": SlowJob(2, overrides=["hooks.Meeting={target: 'parts.py:Meeting'}"], cases=[
        Slow("nothing", "healthy", []),
        Slow("optimizer_rank1", "straggler", [sleep("optimizer", [1])], [1], "optimizer"),
        Slow("data_rank0_hard", "straggler", [sleep("data", [0], HARD_MS)], [0], "data")]),
}


class Stop:
    """A job that ends badly or stands still: what breaks it, and the answer."""

    def __init__(self, name, kind, faults, ranks, phase=None, step=None, nproc=2, options=(), more=(),
                 after=None):
        self.name, self.kind, self.faults, self.ranks = name, kind, faults, ranks
        self.phase, self.step = phase, step
        self.nproc, self.options, self.more, self.after = nproc, options, more, after
        # Rank 0 makes the run directory: without it nobody leaves a trace.
        self.moves = any("ranks" in f and f["place"] != "startup" for f in faults) and not more


def at(place, what, rank=1, step=25, **more):
    return [{"place": place, "what": what, "ranks": [rank], "steps": [step, step], **more}]


STOPS = [
    Stop("sigkill_data", "killed", at("data", "signal", number=9), [1], "data", 25),
    Stop("sigkill_backward_4", "killed", at("backward_middle", "signal", 2, number=9), [2], "backward", 25,
         nproc=4),
    Stop("sigkill_forward_8", "killed", at("forward", "signal", 5, number=9), [5], "forward", 25, nproc=8),
    Stop("memory_cgroup", "killed", at("forward", "memory"), [1], "forward", 25),
    Stop("segfault", "crash", at("forward", "signal", number=11), [1], "forward", 25),
    Stop("exit_0", ("killed", "left_early"), at("optimizer", "exit", code=0), [1], "optimizer", 25),
    Stop("exception_forward", "crash", at("forward", "raise", text="bad sample 17"), [1], "forward", 25),
    Stop("exception_hook_4", "crash", at("hook", "raise", 3, text="disk full"), [3], "hooks", 25, nproc=4),
    Stop("exception_data_8", "crash", at("data", "raise", 6, text="no such shard"), [6], "data", 25, nproc=8),
    Stop("exception_backward_rank0", "crash", at("backward_last", "raise", 0, text="no kernel image"), [0],
         "backward", 25),
    Stop("leaves_early", "left_early", at("data", "leave"), [1], None, 24),
    Stop("nan_on_all", "crash", [{"place": "loss", "what": "nan", "steps": [25, 25]}], [0, 1], None, None,
         more=["stop_on_nan=true"]),
    Stop("loader_worker_killed", "crash", [], [1], None, None, more=["train_data.num_workers=1"],
         after="kill_worker"),
    Stop("all_killed", "ended_abruptly", [], [0, 1], None, None, after="kill_all"),
    Stop("terminated", "terminated", [], [0, 1], None, None, after="terminate"),
    Stop("restart_and_success", "healthy", at("forward", "raise", text="once only"), [],
         options=["--max-restarts=1"]),
    Stop("restart_and_failure", "crash", at("forward", "raise", text="again", attempts=[0, 1]), [1],
         "forward", 25,
         options=["--max-restarts=1"]),
]

STALLS = [
    Stop("hang_data", "stall", at("data", "hang"), [1], "data", 25),
    Stop("hang_backward_4", "stall", at("backward_middle", "hang", 2), [2], "backward", 25, nproc=4),
    Stop("hang_optimizer_8", "stall", at("optimizer", "hang", 3), [3], "optimizer", 25, nproc=8),
    Stop("hang_forward_rank0", "stall", at("forward", "hang", 0), [0], "forward", 25),
    Stop("hang_at_exit", "stall", at("exit", "hang", step=31), [1], "hooks", None, more=["max_steps=30"]),
    Stop("hang_at_startup", "stall", [{"place": "startup", "what": "hang", "ranks": [1]}], [1]),
    Stop("gil_held", "stall", at("forward", "hold"), [1], "forward", 25),
    Stop("sigstop", "stall", at("forward", "signal", number=19), [1], "forward", 25),
    Stop("loader_worker_hangs", "stall", [], [1], "data", None, more=["train_data.num_workers=1"],
         after="stop_worker"),
    Stop("collective_skipped_4", "desync", [], [2], "share_loss", 25, nproc=4,
         more=["hooks.Meeting={target: 'parts.py:Meeting', skip: {rank: 2, step: 25}}"]),
    Stop("collective_of_another_shape", ("desync", "crash"), [], None, "share_loss", 25,
         more=["hooks.Meeting={target: 'parts.py:Meeting', shape: {rank: 1, step: 25}}"]),
    Stop("collectives_swapped", "desync", [], [1], "share_loss", 25,
         more=["hooks.Meeting={target: 'parts.py:Meeting', swap: {rank: 1, step: 25}}"]),
]
