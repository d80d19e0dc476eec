"""A byte-level GPT and the text that it reads: what recipes/gpt.yaml trains.

Plain PyTorch, nothing of rankscope in it: a model whose forward returns a dict with `loss`, a map-style data
set, and a hook that writes a text sample when the training has ended.
"""

import glob
import logging
import math
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 256  # every byte is a token


# ---- Data --------------------------------------------------------------------------------------------------


def text_files(path: str) -> "list[Path]":
    """The files of a path, sorted: one file, a glob, or a folder's *.py and *.txt and *.md files."""
    if Path(path).is_dir():
        found = [file for ending in ("*.py", "*.txt", "*.md") for file in Path(path).rglob(ending)]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True)]
    return sorted(file for file in found if file.is_file() and "site-packages" not in file.parts)


class TextBytes(Dataset):
    """Windows of context_bytes + 1 bytes over the files of a path, one after another.

    Files are split by name, not by position, so that no file is in both splits: about one in twenty is `val`.
    A path that names a single file is split at 95 per cent of its length.

    Args:
        path: a file, a folder or a glob; None is the source text of the Python standard library that runs.
        split: "train" or "val".
        context_bytes: the length T of a sample.
        max_samples: at most so many samples, spread evenly over the text; None is all of them.

    Items are {"tokens": (T,) int64, "targets": (T,) int64}, the targets one byte ahead.
    """

    def __init__(self, path: "str | None" = None, split: str = "train", context_bytes: int = 256,
                 max_samples: "int | None" = None) -> None:
        root = path or sysconfig.get_paths()["stdlib"]
        files = text_files(root)
        if split not in ("train", "val"):
            raise ValueError(f"split is {split!r}; wanted 'train' or 'val'")
        if len(files) == 1:
            text = files[0].read_bytes()
            cut = int(len(text) * 0.95)
            text = text[:cut] if split == "train" else text[cut:]
        else:
            in_val = {file: zlib.crc32(file.name.encode()) % 20 == 0 for file in files}
            chosen = [file for file in files if in_val[file] == (split == "val")]
            text = b"\n".join(file.read_bytes() for file in chosen)
        if len(text) <= context_bytes:
            raise ValueError(f"{root} has {len(text)} bytes of text in {len(files)} files for the split "
                             f"{split!r}; "
                             f"one sample needs {context_bytes + 1}")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context_bytes = context_bytes
        num_windows = (len(self.text) - 1) // context_bytes
        self.num_samples = min(num_windows, max_samples or num_windows)
        self.windows_apart = num_windows // self.num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> "dict[str, Tensor]":
        start = index * self.windows_apart * self.context_bytes
        window = self.text[start : start + self.context_bytes + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


# ---- Model -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then a feed-forward network."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2)  # (B, H, T, C / H)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), dropout)
        return x + F.dropout(self.mlp(self.norm2(x)), dropout)


class ByteGPT(nn.Module):
    """A GPT whose tokens are bytes.

    Args:
        num_layers, d_model, num_heads: depth, width C and heads H of the transformer.
        context_bytes: longest sequence T.
        dropout: probability, on attention and residual branches.
    """

    def __init__(self, num_layers: int = 4, d_model: int = 128, num_heads: int = 4, context_bytes: int = 256,
                 dropout: float = 0.0) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not a multiple of num_heads {num_heads}")
        self.context_bytes = context_bytes
        self.token_embedding = nn.Embedding(VOCABULARY, d_model)
        self.position_embedding = nn.Embedding(context_bytes, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: "Tensor | None" = None) -> "dict[str, Tensor | int]":
        """tokens (B, T) -> logits (B, T, 256); with targets (B, T) also the loss in nats and bits a byte."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "logits": logits,
                "num_tokens": tokens.numel()}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Prompt and num_bytes more, drawn one after another from a generator of their own."""
        device = self.head.weight.device
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.context_bytes :])["logits"][0, -1]
            chances = (logits.float() / temperature).softmax(dim=-1).cpu()
            drawn = torch.multinomial(chances, 1, generator=generator).to(device)
            tokens = torch.cat([tokens, drawn[None]], dim=1)
        return bytes(tokens[0].tolist())


# ---- A hook of one's own -----------------------------------------------------------------------------------


class TextSample:
    """Writes what the model makes of a prompt into train.log when the training has ended.

    Args:
        prompt: the text to go on with.
        num_bytes: how many bytes to draw.
    """

    def __init__(self, prompt: str = "def ", num_bytes: int = 300) -> None:
        self.prompt, self.num_bytes = prompt, num_bytes

    def after_train(self, state) -> None:
        # A sharded model gathers in its forward, which a single rank must not do alone.
        sharded = any(hasattr(parameter, "full_tensor") for parameter in state.model.parameters())
        if state.rank == 0 and state.error is None and not sharded:
            state.model.eval()
            text = state.model.generate(self.prompt.encode(), self.num_bytes).decode(errors="replace")
            logging.getLogger(__name__).info("a sample of the model:\n%s", text)
