"""Mount options: where they come from, which wins, and what is refused with one clear line."""

import os
import socket
from pathlib import Path

import pytest

from cachexfs import machine
from cachexfs.cli import options
from cachexfs.cli.identity import resolve_user
from cachexfs.cli.members import derived_port
from cachexfs.cli.options import load_options
from cachexfs.config import MountOptions, NodeAddress
from cachexfs.errors import UsageError

GIB = 1 << 30


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"s" * 32)
    path.chmod(0o600)
    return path


def load(
    *flags: str, environ: dict[str, str] | None = None, config: Path | None = None, sloppy: bool = False
) -> MountOptions:
    return load_options("/pfs", "/mnt/x", flags, str(config) if config else None, environ or {}, sloppy)


def cluster(secret: Path, *flags: str, environ: dict[str, str] | None = None) -> MountOptions:
    return load(f"secret={secret},nvme=/nvme", *flags, environ=environ)


def refusal(*flags: str, **keywords: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(*flags, **keywords)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_alone_with_nothing_but_defaults() -> None:
    found = load()
    assert found.alone
    assert found.fsync == "pfs"
    assert found.memory == machine.memory_limit_bytes() // 4
    assert (found.listen_port, found.secret_file, found.catalogue) == (0, None, ())
    assert found.node == socket.gethostname().partition(".")[0]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('memory = "1G"\nkeep_fast = 5\nverify = true\ndrain_workers = 7\n')
    environ = {"CACHEXFS_MEMORY": "2G", "CACHEXFS_KEEP_FAST": "6", "CACHEXFS_CONFIG": str(file)}
    found = load("memory=3G", environ=environ)
    assert (found.memory, found.keep_fast, found.drain_workers, found.verify) == (3 * GIB, 6, 7, True)
    assert load("memory=3G", config=file).keep_fast == 5
    assert load(f"config={file}").drain_workers == 7
    assert load("verify=off", config=file).verify is False


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    assert "unknown option 'memroy'" in refusal("memroy=1G")
    assert "did you mean 'memory'?" in refusal("memroy=1G")
    assert "CACHEXFS_MEMROY" in refusal(environ={"CACHEXFS_MEMROY": "1G"})
    file = tmp_path / "c.toml"
    file.write_text('fsnyc = "pfs"')
    assert "did you mean 'fsync'?" in refusal(config=file)
    assert str(file) in refusal(config=file)
    assert load("memroy=1G", sloppy=True).alone


def test_what_mount_and_fstab_add_is_accepted() -> None:
    words = "rw,_netdev,nofail,user,noauto,defaults,nosuid,nodev,noatime,x-systemd.automount,x-anything=1,comment=hello"
    assert load(words) == load()
    assert load("allow_other").allow_other
    assert "read-only" in refusal("ro")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("memory", "needs a value"),
        ("memory=lots", "'lots' is not a size"),
        ("memory=1K", "less than"),
        ("fsync=partnr", "did you mean 'partner'?"),
        ("route=fast", "none of partner, direct, auto"),
        ("node_timeout=0", "shorter than"),
        ("drain_workers=0", "whole number from 1"),
        ("drain_bandwidth=x", "not a size"),
        ("verify=maybe", "neither on nor off"),
        ("replicas=0", "whole number from 1"),
        ("listen=a:b:c", "[ADDRESS]:PORT"),
        ("catalogue=etcd1", "has no port"),
        ("job=a/b", "letters, digits"),
        ("nodes=n[1-2", "brackets do not match"),
        ("nodes=@/does/not/exist", "cannot read the nodes file"),
        ("secret=/does/not/exist", "cannot read the secret"),
        ("nodes=n1,n2", "unknown option 'n2'"),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_is_right(flags: str, said: str) -> None:
    assert said in refusal(flags)


def test_several_nodes_need_secret_and_nvme(secret: Path) -> None:
    assert "secret=FILE" in refusal("nodes=n[1-2],node=n1,nvme=/nvme")
    assert "nvme=DIR" in refusal(f"nodes=n[1-2],node=n1,secret={secret}")
    assert "replicas=2" in refusal(f"nodes=n[1-2],node=n1,nvme=/nvme,secret={secret},replicas=2")


def test_a_secret_that_is_none_is_refused(secret: Path, tmp_path: Path) -> None:
    secret.chmod(0o604)
    assert "chmod 600" in refusal(f"secret={secret}")
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    assert "5 bytes" in refusal(f"secret={secret}")
    assert "not a regular file" in refusal(f"secret={tmp_path}")


def test_nodes_in_each_form(secret: Path, tmp_path: Path) -> None:
    port = derived_port("j")
    assert 20000 <= port < 30000
    assert cluster(secret, "nodes=n[1-2,7],node=n7,job=j").nodes == tuple(
        NodeAddress(n, n, port) for n in ("n1", "n2", "n7")
    )
    assert cluster(secret, "nodes=n1:70;n2:71,node=n2").nodes == (
        NodeAddress("n1", "n1", 70),
        NodeAddress("n2", "n2", 71),
    )
    named = cluster(secret, "nodes=a=10.0.0.1:70;b=10.0.0.2:70,node=b")
    assert named.nodes == (NodeAddress("a", "10.0.0.1", 70), NodeAddress("b", "10.0.0.2", 70))
    assert (named.listen_host, named.listen_port) == ("10.0.0.2", 70)
    one_host = cluster(secret, "nodes=127.0.0.1:70;127.0.0.1:71,node=127.0.0.1:71")
    assert [node.name for node in one_host.nodes] == ["127.0.0.1:70", "127.0.0.1:71"]
    file = tmp_path / "nodes"
    file.write_text("# the job\nn1\nn2:99  # the other\n\n")
    assert cluster(secret, f"nodes=@{file},node=n1,job=j").nodes == (
        NodeAddress("n1", "n1", port),
        NodeAddress("n2", "n2", 99),
    )
    slurm = {"CACHEXFS_NODES": "n[1-2],m3", "SLURMD_NODENAME": "m3"}
    assert cluster(secret, environ=slurm).node == "m3"


def test_two_nodes_of_one_address_need_ports(secret: Path) -> None:
    with pytest.raises(UsageError, match="give each a port"):
        cluster(secret, "nodes=a=127.0.0.1;b=127.0.0.1,node=a")


def test_this_node_is_found_by_host_name_launcher_or_address(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n2.cluster.example")
    assert cluster(secret, "nodes=n[1-3]").node == "n2"
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    assert cluster(secret, "nodes=n1.x;n2.x").node == "n2.x"
    assert cluster(secret, "nodes=n[1-3]", environ={"SLURMD_NODENAME": "n3"}).node == "n3"
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert cluster(secret, "nodes=192.0.2.1;127.0.0.1").node == "127.0.0.1"
    with pytest.raises(UsageError, match=r"'elsewhere', is not one of the nodes \(n1, n2, n3\): give node=NAME"):
        cluster(secret, "nodes=n[1-3]")
    with pytest.raises(UsageError, match="'n9' is not one of the nodes"):
        cluster(secret, "nodes=n[1-3],node=n9")


def test_a_job_comes_from_the_launcher_or_from_the_mount(secret: Path) -> None:
    assert load(environ={"SLURM_JOB_ID": "42"}).job == "42"
    assert load(environ={"PBS_JOBID": "42.server[1]"}).job == "42.server-1-"
    assert load("job=mine", environ={"SLURM_JOB_ID": "42"}).job == "mine"
    assert load(environ={"TORCHELASTIC_RUN_ID": "none"}).job == load().job
    one, other = (load_options(pfs, "/mnt/x", (), None, {}).job for pfs in ("/pfs", "/pfs2"))
    assert one != other
    # The same on all nodes, whatever each calls itself and where it mounts.
    flags = [f"secret={secret},nvme=/nvme,nodes=n[1-2]"]
    jobs = {
        load_options("/pfs", mountpoint, [*flags, f"node={node}"], None, {}).job
        for mountpoint, node in (("/a", "n1"), ("/b", "n2"))
    }
    assert len(jobs) == 1


def test_domains_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "domains"
    file.write_text("n[1-2] rack1\nn3: rack2 # the other\nn4=rack2\n")
    assert load(f"domains={file}").domains == {"n1": "rack1", "n2": "rack1", "n3": "rack2", "n4": "rack2"}
    file.write_text("n1\n")
    assert "NODE DOMAIN" in refusal(f"domains={file}")


def test_a_mount_point_in_the_pfs_or_the_reverse_is_refused() -> None:
    for pfs, mountpoint in (("/a", "/a"), ("/a", "/a/b"), ("/a/b", "/a")):
        with pytest.raises(UsageError, match="choose another"):
            load_options(pfs, mountpoint, (), None, {})


def test_paths_become_absolute() -> None:
    found = load_options("pfs", "mnt", ["staging=stage"], None, {})
    assert (found.pfs, found.mountpoint, found.staging) == tuple(os.path.abspath(p) for p in ("pfs", "mnt", "stage"))


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("memory =")
    assert "is not TOML" in refusal(config=file)
    file.write_text("[memory]\nsize = 1")
    assert "must be a string" in refusal(config=file)
    assert "cannot read the configuration" in refusal(config=tmp_path / "none.toml")
    file.write_text('nodes = ["n1", "n2"]\nnode = "n1"')
    assert "secret=FILE" in refusal(config=file)


def fake_machine(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_memory_is_what_the_tightest_cgroup_allows(tmp_path: Path) -> None:
    meminfo = {"proc/meminfo": "MemTotal:       1048576 kB\nMemFree: 1 kB\n"}
    assert machine.memory_limit_bytes(fake_machine(tmp_path / "none", meminfo)) == GIB
    second = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": "104857600\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
    }
    assert machine.memory_limit_bytes(fake_machine(tmp_path / "v2", meminfo | second)) == 100 << 20
    first = {
        "proc/self/cgroup": "9:cpu,memory:/slurm/job_1\n1:name=systemd:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "209715200\n",
        "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": "52428800\n",
    }
    assert machine.memory_limit_bytes(fake_machine(tmp_path / "v1", meminfo | first)) == 50 << 20
    with pytest.raises(UsageError, match="memory=64G"):
        machine.memory_limit_bytes(str(tmp_path / "nothing"))


def test_every_option_of_the_contract_is_there() -> None:
    contract = "memory staging nvme nodes node job domains replicas listen secret catalogue node_timeout fsync route"
    contract += " drain_workers drain_bandwidth keep_fast full_timeout fsync_timeout offline verify hide_xattrs"
    assert set(contract.split()) <= set(options.OPTIONS)


def test_only_root_mounts_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="only root can mount for another user"):
        resolve_user("root")
