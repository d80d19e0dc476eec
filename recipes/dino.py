"""Self-distillation (DINO) on the bytes of source text: what recipes/dino.yaml trains.

A student learns to give masked and smaller views of a snippet the same prototypes that its teacher, a slow
average of itself, gives the whole view. Nobody tells it what the snippets are; whether the features are worth
something is checked by asking for the top-level package that an unseen snippet is from, by its neighbours.

Plain PyTorch: a model, a data set, and two hooks. Caron et al., 2021; Sinkhorn assignment as in SwAV, 2020.
"""

import contextlib
import copy
import logging
import math
import sysconfig
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

logger = logging.getLogger(__name__)

MASK = 256  # the token that hides a byte; 0 to 255 are the bytes themselves


# ---- Data --------------------------------------------------------------------------------------------------


def source_files(path: "str | None", split: str) -> "list[Path]":
    """*.py files of a folder (None: the standard library), split by name: about one in ten is `val`."""
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}; wanted 'train' or 'val'")
    root = Path(path or sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)
    found = [file for file in files if (zlib.crc32(file.name.encode()) % 10 == 0) == (split == "val")]
    if not found:
        raise ValueError(f"{root} has no *.py files for the split {split!r} ({len(files)} in all)")
    return found


class Views(Dataset):
    """Views of snippets of source text: two large ones, whole and masked, and a few small ones.

    Args:
        path: a folder with *.py files; None is the Python standard library that runs this.
        split: "train" (views drawn anew each time) or "val" (other files, the same views each time).
        snippet_bytes: the stretch of a file that all views of a sample come from.
        large_bytes, small_bytes, num_small: lengths of the views, and how many small ones.
        mask_ratio: share of the student's large views that is hidden, in runs of 8 bytes.
        max_samples: at most so many snippets, spread evenly over the files; None is all of them.

    Items are {"whole": (2, T), "masked": (2, T), "small": (num_small, t)}, int64.
    """

    def __init__(self, path: "str | None" = None, split: str = "train", snippet_bytes: int = 4096,
                 large_bytes: int = 384, small_bytes: int = 256, num_small: int = 2, mask_ratio: float = 0.2,
                 max_samples: "int | None" = None) -> None:
        if not 0 < small_bytes <= large_bytes <= snippet_bytes:
            raise ValueError(f"small_bytes {small_bytes}, large_bytes {large_bytes} and snippet_bytes"
                             f" {snippet_bytes}: each must be above 0 and at most the next")
        files = source_files(path, split)
        snippets = [snippet for file in files for snippet in cut(file.read_bytes(), snippet_bytes)]
        if not snippets:
            raise ValueError(f"none of the {len(files)} files has {snippet_bytes} bytes (snippet_bytes)")
        apart = max(len(snippets) // (max_samples or len(snippets)), 1)
        self.snippets = torch.stack(snippets[::apart][:max_samples])  # (N, snippet_bytes) uint8
        self.large_bytes, self.small_bytes, self.num_small = large_bytes, small_bytes, num_small
        self.mask_ratio = mask_ratio
        self.is_fixed = split == "val"

    def __len__(self) -> int:
        return len(self.snippets)

    def __getitem__(self, index: int) -> "dict[str, Tensor]":
        rng = torch.Generator().manual_seed(index) if self.is_fixed else None  # None: the worker's own seed
        snippet = self.snippets[index].long()
        whole = self.crops(snippet, 2, self.large_bytes, rng)
        hidden = torch.rand(2, math.ceil(self.large_bytes / 8), generator=rng) < self.mask_ratio
        hidden = hidden.repeat_interleave(8, dim=1)[:, : self.large_bytes]
        return {"whole": whole, "masked": whole.masked_fill(hidden, MASK),
                "small": self.crops(snippet, self.num_small, self.small_bytes, rng)}

    @staticmethod
    def crops(snippet: Tensor, count: int, length: int, rng: "torch.Generator | None") -> Tensor:
        starts = torch.randint(len(snippet) - length + 1, (count,), generator=rng)
        return torch.stack([snippet[start : start + length] for start in starts])


def cut(text: bytes, length: int) -> "list[Tensor]":
    """A file's bytes in snippets of one length; the rest of it is left out."""
    whole = len(text) // length * length
    if not whole:
        return []
    return list(torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, length))


# ---- Model -------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """Bytes -> one feature vector: the mean over the embeddings of the view's bytes, pairs and triples.

    Pairs and triples share num_buckets rows by a hash; layer norm makes a vector of any length of text alike.
    """

    def __init__(self, width: int, num_buckets: int = 4096) -> None:
        super().__init__()
        num_rows = (MASK + 1, num_buckets, num_buckets)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in num_rows)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.02)  # small: training can soon change them
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, C)
        gram = tokens  # the number of the n-gram that begins at each position
        mean = F.embedding_bag(gram, self.tables[0].weight, mode="mean")
        for length, table in enumerate(self.tables[1:], start=1):
            gram = (gram[:, :-1] * 40503 + tokens[:, length:] + 1) % 1_000_003
            mean = mean + F.embedding_bag(gram % table.num_embeddings, table.weight, mode="mean")
        return self.norm(mean)


class Head(nn.Module):
    """Features -> a logit for each prototype: the cosine with it, after a small network."""

    def __init__(self, width: int, num_prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64))
        self.prototypes = nn.Parameter(torch.randn(num_prototypes, 64))

    def forward(self, features: Tensor) -> Tensor:  # (B, C) -> (B, K)
        return F.normalize(self.mlp(features), dim=-1) @ F.normalize(self.prototypes, dim=-1).T


class SelfDistillation(nn.Module):
    """Student and teacher. The teacher follows in TeacherUpdate, a hook: without it, it stays as it was made.

    Args:
        width: C, the length of a feature vector.
        num_prototypes: K.
        balance: what keeps all snippets from ending up on one prototype: "sinkhorn" shares each batch out
            evenly, "centring" subtracts the running mean of the teacher's logits, "none" invites a collapse.
        student_temperature: divides the student's logits; the teacher's comes from TeacherUpdate.
    """

    def __init__(self, width: int = 128, num_prototypes: int = 128, balance: str = "sinkhorn",
                 student_temperature: float = 0.1) -> None:
        super().__init__()
        if balance not in ("centring", "sinkhorn", "none"):
            raise ValueError(f"balance is {balance!r}; wanted 'centring', 'sinkhorn' or 'none'")
        self.balance = balance
        self.student_temperature = student_temperature
        self.teacher_temperature = 0.05
        self.student = nn.ModuleDict({"backbone": Backbone(width), "head": Head(width, num_prototypes)})
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(num_prototypes))
        self.register_buffer("batch_center", torch.zeros(num_prototypes), persistent=False)

    def forward(self, whole: Tensor, masked: Tensor, small: Tensor) -> "dict[str, Tensor]":
        """whole, masked (B, 2, T), small (B, S, t) -> loss in nats and the teacher's logits (2, B, K)."""
        with torch.no_grad():
            logits = torch.stack([self.run(self.teacher, view) for view in whole.unbind(1)])  # (2, B, K)
            if self.training:
                self.batch_center.copy_(logits.mean(dim=(0, 1)))
            if self.balance == "centring":
                logits = logits - self.center
            targets = torch.softmax(logits / self.teacher_temperature, dim=-1)
            if self.balance == "sinkhorn":
                targets = torch.stack([sinkhorn(part / self.teacher_temperature) for part in logits])
        guesses = [F.log_softmax(self.run(self.student, view) / self.student_temperature, dim=-1)
                   for view in (*masked.unbind(1), *small.unbind(1))]
        # Each of the teacher's views with each of the student's, but for the same large one.
        losses = [-(target * guess).sum(-1).mean() for position, target in enumerate(targets)
                  for other, guess in enumerate(guesses) if other != position]
        return {"loss": torch.stack(losses).mean(), "teacher_logits": logits}

    @staticmethod
    def run(network: nn.ModuleDict, view: Tensor) -> Tensor:
        return network["head"](network["backbone"](view))


def sinkhorn(logits: Tensor, num_rounds: int = 3) -> Tensor:
    """(B, K) -> probabilities whose sums over this rank's batch are alike for all prototypes."""
    shares = torch.exp(logits - logits.max())
    for _ in range(num_rounds):
        shares = shares / shares.sum(0, keepdim=True).clamp(min=1e-12)
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-12)
    return shares


# ---- Hooks -------------------------------------------------------------------------------------------------


class TeacherUpdate:
    """Moves the teacher after each step: temperature by schedule, weights and center as running means.

    Args:
        temperature: the teacher's, from the first value to the second over warmup_steps, then the second.
        momentum: how much of itself the teacher keeps each step; rises to 1 over the run by a cosine.
        center_momentum: the same for the center, whose new part is the mean over all ranks' batches.
    """

    emits = {"teacher/temperature": "factor", "teacher/momentum": "share"}

    def __init__(self, temperature=(0.04, 0.06), warmup_steps: int = 100, momentum: float = 0.97,
                 center_momentum: float = 0.9, log_frequency: "int | None" = None, span=None) -> None:
        self.temperature, self.warmup_steps = temperature, warmup_steps
        self.momentum, self.center_momentum = momentum, center_momentum
        self.log_frequency = log_frequency or 10
        self.span = span

    def before_step(self, state):
        first, last = self.temperature
        done = min(state.step / max(self.warmup_steps, 1), 1.0)
        state.model.teacher_temperature = first + (last - first) * done

    @torch.no_grad()
    def after_step(self, state):
        model = state.model
        done = state.step / state.max_steps if state.max_steps else 0.0
        momentum = 1 - (1 - self.momentum) * (math.cos(math.pi * done) + 1) / 2
        teacher, student = list(model.teacher.parameters()), list(model.student.parameters())
        torch._foreach_lerp_(teacher, student, 1 - momentum)
        if dist.is_initialized():
            # The ranks wait for each other here: a trace says so.
            meeting = self.span("TeacherUpdate.center", sync=True) if self.span else contextlib.nullcontext()
            with meeting as span:
                if span is not None:
                    span.ready()
                dist.all_reduce(model.batch_center)
                model.batch_center /= dist.get_world_size()
        model.center.lerp_(model.batch_center, 1 - self.center_momentum)
        if state.step % self.log_frequency == 0:
            return {"teacher/temperature": model.teacher_temperature, "teacher/momentum": momentum}


class NearestNeighbours:
    """After each evaluation: from which top-level package is an unseen snippet, by its neighbours' vote?

    Neighbours are the num_neighbours snippets of other files whose features have the largest cosine with its
    own. What that is worth show the same question to histograms of the bytes, the share of the most frequent
    package, and the untrained features, whose accuracy is the first point, at step 0.
    """

    emits = {"val/knn_accuracy": "share", "val/knn_accuracy_bytes": "share",
             "val/knn_accuracy_chance": "share"}

    def __init__(self, path: "str | None" = None, snippet_bytes: int = 512, num_neighbours: int = 10,
                 num_packages: int = 12, snippets_per_package: int = 100) -> None:
        self.num_neighbours = num_neighbours
        root = Path(path or sysconfig.get_paths()["stdlib"])
        banks = {split: {} for split in ("train", "val")}
        for split, bank in banks.items():
            for file in source_files(path, split):
                package = file.relative_to(root).parts[0]
                if not package.endswith(".py"):  # a module beside the packages is in none
                    bank.setdefault(package, []).extend(cut(file.read_bytes(), snippet_bytes))
        sizes = {package: min(len(snippets), len(banks["train"].get(package, [])), snippets_per_package)
                 for package, snippets in banks["val"].items()}
        packages = sorted(sizes, key=lambda package: (-sizes[package], package))[:num_packages]
        self.banks = {split: labelled(bank, packages, snippets_per_package) for split, bank in banks.items()}

    def before_train(self, state):
        found = self.measure(state, "nearest neighbours before training")
        # The curve begins with the untrained features; a resumed run has that point already.
        return found if state.step == 0 else None

    def after_evaluate(self, state):
        return self.measure(state, "nearest neighbours")

    @torch.no_grad()
    def measure(self, state, title: str) -> "dict[str, float]":
        """val/knn_*, and a line in the log."""
        (texts, labels), (unseen, truth) = self.banks["train"], self.banks["val"]
        backbone = state.model.teacher["backbone"]
        features = [torch.cat([backbone(part.to(state.device)).float().cpu() for part in bank.split(256)])
                    for bank in (texts, unseen)]
        histograms = [byte_counts(bank) for bank in (texts, unseen)]
        most_frequent = Counter(truth.tolist()).most_common(1)[0][1]
        found = {"knn_accuracy": self.accuracy(*features, labels, truth),
                 "knn_accuracy_bytes": self.accuracy(*histograms, labels, truth),
                 "knn_accuracy_chance": most_frequent / len(truth)}
        if state.rank == 0:
            logger.info("%s: %s", title, " ".join(f"{name} {value:.3f}" for name, value in found.items()))
        return {f"val/{name}": value for name, value in found.items()}

    def accuracy(self, known: Tensor, asked: Tensor, labels: Tensor, truth: Tensor) -> float:
        center = known.mean(0)
        known, asked = F.normalize(known - center, dim=1), F.normalize(asked - center, dim=1)
        nearest = (asked @ known.T).topk(self.num_neighbours).indices  # (Q, neighbours)
        votes = F.one_hot(labels[nearest], int(labels.max()) + 1).sum(1)
        return (votes.argmax(1) == truth).float().mean().item()


def byte_counts(bank: Tensor) -> Tensor:
    """How often each byte occurs in each snippet: (N, bytes) int64 -> (N, 256) float32."""
    # one_hot would take 2 KB a byte, above a gigabyte in all, on each rank.
    ones = torch.ones_like(bank, dtype=torch.float32)
    return torch.zeros(len(bank), 256).scatter_add_(1, bank, ones)


def labelled(bank: dict, packages: list, per_package: int) -> "tuple[Tensor, Tensor]":
    """Snippets (N, bytes) int64 and their packages' numbers (N,), evenly over each package's snippets."""
    chosen = [(snippet, number) for number, package in enumerate(packages)
              for snippet in bank[package][:: max(len(bank[package]) // per_package, 1)][:per_package]]
    snippets, numbers = zip(*chosen)
    return torch.stack(snippets).long(), torch.tensor(numbers)
