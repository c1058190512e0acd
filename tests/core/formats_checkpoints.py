"""Writes real checkpoints below a directory: ``python formats_checkpoints.py DIR [single]``.

Runs in its own process, so that the tests themselves stay without torch. Two gloo ranks write one FSDP
checkpoint; everything else is saved by this process alone (``single``: only that).
"""

import logging
import os
import pickle
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def state() -> dict[str, object]:
    torch.manual_seed(1)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.complex64, torch.bool)
    weights = {f"layers.{i}.w": torch.ones(5 + i, 7).to(kind) for i, kind in enumerate(kinds)}
    weights |= {
        "scalar": torch.tensor(3.0),
        "line": torch.ones(300),
        "cube": torch.ones(2, 3, 4),
        "four": torch.ones(2, 2, 300, 1),
        "empty": torch.ones(0),
        "big": torch.ones(300, 300),
        "image": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "f8": torch.ones(4, 4).to(torch.float8_e4m3fn),
    }
    optim = {"step": 3, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "rng": torch.get_rng_state()}
    return {"model": weights, "optim": optim, "rng": random.Random(1).getstate(), "zeichen-ä\n": torch.ones(3)}


def single_process(root: Path) -> None:
    def save(name: str, **writer: object) -> None:
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(str(root / name), **writer), no_dist=True)

    dcp.save(state(), checkpoint_id=root / "path-object", no_dist=True)
    save("plain")
    save("many-files", single_file_per_rank=False)
    save("threads", thread_count=3, sync_files=False)
    tensors = {f"t{i}": torch.ones(i + 1, 9) for i in range(5)}
    writer = dcp.FileSystemWriter(str(root / "safetensors"), serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    dcp.save({}, checkpoint_id=root / "nothing", no_dist=True)
    mapping = {name: 1 + i % 2 for i, name in enumerate(tensors)}
    hf = HuggingFaceStorageWriter(str(root / "hf"), fqn_to_index_mapping=mapping)
    dcp.save(tensors, storage_writer=hf, no_dist=True)
    (root / "hf-torch").mkdir()
    save_file(tensors, root / "hf-torch" / "model.safetensors")
    torch.save({"a": torch.ones(1000), "b": [1, 2]}, root / "hf-torch" / "optimizer.pt")
    torch.save({"a": torch.ones(10)}, root / "hf-torch" / "old.pt", _use_new_zipfile_serialization=False)


def hand_made(root: Path) -> None:
    """Names that torch itself never makes, pickled by the real classes."""
    names = ["a\nb", "sub/dir/x.distcp", "caf\udce9", "./dot//x"]
    storage = {MetadataIndex(str(i), [i]): _StorageInfo(n, i * 10, 5) for i, n in enumerate(names)}
    storage |= {MetadataIndex(f"again{i}"): _StorageInfo(n, 100_000, 2**40) for i, n in enumerate(names[:1])}
    storage[MetadataIndex("zipped")] = _StorageInfo("z", 0, 9, ["zstd"])
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Metadata({}, storage_data=storage), protocol=protocol)
        (root / f"names.{protocol}").write_bytes(data)


def like_megatron(root: Path) -> None:
    """Megatron keeps every rank's plan of the save in the metadata."""
    found = Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, 9)})
    plan = create_default_local_save_plan({"w": torch.ones(3), "b": [1]}, True)
    vars(found)["all_local_plans"] = [plan]
    (root / "megatron.metadata").write_bytes(pickle.dumps(found))


def deepspeed(root: Path) -> None:
    step = root / "deepspeed" / "global_step10"
    step.mkdir(parents=True)
    model = {"module": {"w": torch.ones(9)}, "dp_world_size": 3, "mp_world_size": 1, "when": Path("x")}
    model["ds_config"] = {"zero_optimization": {"stage": 1}}
    torch.save(model, step / "mp_rank_00_model_states.pt")
    for rank in range(3):
        torch.save({"o": torch.ones(9)}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "deepspeed" / "latest").write_text("global_step10")


def two_ranks(rank: int, root: str) -> None:
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/.rendezvous", rank=rank, world_size=2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    weights, optim = get_state_dict(model, optimizer)
    both = {"model": weights, "optim": optim, "step": 1}
    dcp.save(both, checkpoint_id=f"{root}/fsdp")
    dcp.save(both, checkpoint_id=f"{root}/per-rank", use_collectives=False)
    dcp.save({"one": torch.ones(2)}, checkpoint_id=f"{root}/empty-shard")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that exits normally


def main() -> None:
    root = Path(sys.argv[1])
    single_process(root)
    hand_made(root)
    like_megatron(root)
    deepspeed(root)
    if sys.argv[2:] != ["single"]:
        mp.spawn(two_ranks, args=(str(root),), nprocs=2, join=True)


if __name__ == "__main__":
    main()
