"""One rank of a small FSDP2 training run whose every number is decided by step and rank.

Role: what the demo saves and restores. It knows nothing of CacheX FS: ``dcp.save`` and ``dcp.load`` get a plain path.
Concurrency: lives in a process of its own (``ranks``); all methods but ``digest`` are collective. torch is imported
here and nowhere else in the demo, so that the command line and the daemon do without it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cachexfs.demo.ranks import SaveSpan

LAYERS = 4
BATCH = 4
BYTES_PER_PARAMETER = 12  # fp32 weight and Adam's two moments

State = dict[str, Any]  # DCP's own type: nested dicts of tensors and plain values


@dataclass(frozen=True)
class RankSetup:
    """Where a rank stands: ``world`` ranks meet at 127.0.0.1:``port``; ``mib`` is the checkpoint's size, all ranks."""

    rank: int
    world: int
    port: int
    mib: float
    seed: int


def width_of(mib: float) -> int:
    """Width of the square layers whose weights and moments come to about ``mib`` MiB."""
    parameters = max(mib * (1 << 20) / BYTES_PER_PARAMETER, 1024)
    return max(int((parameters / LAYERS) ** 0.5) // 8 * 8, 8)


class Trainer:
    """A rank's model, optimizer and step. Equal setups and steps give equal bits."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.step = 0
        torch.set_num_threads(1)
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{setup.port}", rank=setup.rank, world_size=setup.world
        )
        width = width_of(setup.mib)
        torch.manual_seed(setup.seed)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
        mesh = init_device_mesh("cpu", (setup.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        self.model: nn.Module = nn.Sequential(*blocks)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=False)
        self.width = width

    def train(self, steps: int) -> list[float]:
        """Take ``steps`` steps; returns each step's loss, the mean over the ranks in rank order."""
        losses = []
        for _ in range(steps):
            data = torch.Generator().manual_seed(self.step * self.setup.world + self.setup.rank)
            inputs = torch.randn(BATCH, self.width, generator=data)
            loss = (self.model(inputs) - inputs.roll(1, dims=1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            parts = [torch.zeros((), dtype=torch.float64) for _ in range(self.setup.world)]
            dist.all_gather(parts, loss.detach().double())
            losses.append(sum(part.item() for part in parts) / self.setup.world)
        return losses

    def save(self, path: str) -> SaveSpan:
        """``dcp.save`` of model, optimizer and step to ``path``, as any training script calls it."""
        state = self._state()
        begin = time.time()
        dcp.save(state, checkpoint_id=path)
        return SaveSpan(begin, time.time())

    def digest(self) -> str:
        """SHA-256 over names, shapes and bytes of everything that this rank holds (its shards, not its peers')."""
        return digest_of(self._state())

    def load_digest(self, path: str) -> str:
        """``dcp.load`` from ``path`` into zeros of the right shapes, beside the model; the digest of what came."""
        return digest_of(self._loaded(path))

    def resume(self, path: str) -> str:
        """``dcp.load`` from ``path`` into this rank's model and optimizer; the digest of the result."""
        state = self._loaded(path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["progress"]["step"]
        return self.digest()

    def _loaded(self, path: str) -> State:
        state = {key: zeros_like(value) for key, value in self._state().items()}
        dcp.load(state, checkpoint_id=path)
        return state

    def _state(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": {"step": self.step}}


def zeros_like(state: object) -> object:
    """A state dict of the same structure with zeros for all tensors; other values stay."""
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(zeros_like(value) for value in state)
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    return state


def digest_of(state: object) -> str:
    """SHA-256 of a state dict: names, types, shapes and the bytes of the local part of every tensor."""
    digest = hashlib.sha256()

    def walk(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                walk(f"{name}/{key}", value[key])
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(f"{name}/{index}", item)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} {tuple(local.shape)}\n".encode())
            digest.update(local.detach().cpu().contiguous().numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}\n".encode())

    walk("", state)
    return digest.hexdigest()
