"""How ``MountOptions`` come from defaults, a TOML file, the environment and flags.

Role: parsed once, at the edge, by ``cachexfs mount``. Touches neither the PFS nor the mount point. No concurrency.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cachexfs.cli.addresses import listen_host
from cachexfs.cli.identity import default_runtime_dir_for, resolve_user
from cachexfs.cli.members import derived_job, derived_port, launcher_job, own_name, parse_nodes, with_ports
from cachexfs.cli.secrets_file import check_secret_file
from cachexfs.cli.words import nearest, parse_path, read_lines
from cachexfs.config import MountOptions, default_runtime_dir
from cachexfs.core import hostlist, sizes
from cachexfs.errors import UsageError
from cachexfs.machine import memory_limit_bytes

MEMORY_BYTES_MIN = 1 << 20
MEMORY_SHARE_DEFAULT = "25%"
NICE_OF_ROOT = -10
PREFAULT_PART, PREFAULT_BYTES_MAX = 4, 2 << 30  # of memory, by default
ENV_PREFIX = "CACHEXFS_"
#: Environment variables with our prefix that are no options: other parts of the project read them.
ENV_FOREIGN = (
    "CACHEXFS_TEST_",
    "CACHEXFS_DEMO_",
    "CACHEXFS_SLURM_",
    "CACHEXFS_BENCH_",
    "CACHEXFS_ETCD",
    "CACHEXFS_DATA",
)
#: Words of fstab(5) and mount(8) that say nothing to us.
MOUNT_WORDS = frozenset(
    (
        *(
            "rw",
            "_netdev",
            "nofail",
            "user",
            "users",
            "owner",
            "group",
            "noauto",
            "auto",
            "defaults",
            "nosuid",
            "nodev",
        ),
        *("noatime", "relatime", "async", "exec", "noexec", "dev", "suid", "nodiratime", "strictatime"),
    )
)
Value = str | bool
"""An option before it is understood: text, or True for a bare word."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key: the field that it sets, how its text is understood, and what a bare word means."""

    field: str
    parse: Callable[[str], object]
    bare: str | None = None


def _flag(text: str) -> bool:
    word = text.lower()
    if word in ("1", "on", "yes", "true"):
        return True
    if word in ("0", "off", "no", "false"):
        return False
    raise UsageError(f"'{text}' is neither on nor off")


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in words:
            return text
        raise UsageError(f"'{text}' is none of {', '.join(words)}{nearest(text, words)}")

    return parse


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise UsageError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _seconds(low_s: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        seconds = sizes.parse_duration(text)
        if seconds < low_s:
            raise UsageError(f"'{text}' is shorter than {low_s:g} s")
        return seconds

    return parse


def _memory(text: str) -> int:
    size = sizes.parse_size(text, memory_limit_bytes())
    if size < MEMORY_BYTES_MIN:
        raise UsageError(f"'{text}' is less than {sizes.format_size(MEMORY_BYTES_MIN)}")
    return size


def _endpoints(text: str) -> tuple[str, ...]:
    if text == "auto":
        return ()
    endpoints = tuple(hostlist.split_outside_brackets(text, ",; "))
    for endpoint in endpoints:
        _, port = hostlist.split_host_port(re.sub(r"^https?://", "", endpoint).rstrip("/"))
        if not port:
            raise UsageError(f"'{endpoint}' has no port: write auto, or host:port;host:port of the site's etcd")
    return endpoints


def _job(text: str) -> str:
    return hostlist.check_name(text, "the job")


def _domains(text: str) -> dict[str, str]:
    """``NODE DOMAIN`` a line (``NODE`` may be a host list, ``:`` or ``=`` may stand between the two)."""
    domains: dict[str, str] = {}
    for line in read_lines(parse_path(text), "domains"):
        match = re.fullmatch(r"(\S+?)\s*[\s:=]\s*(\S+)", line)
        if not match:
            raise UsageError(f"'{line}' in the domains file '{text}' is not NODE DOMAIN")
        for name in hostlist.expand(match.group(1)):
            domains[name] = hostlist.check_name(match.group(2), "the domain")
    return domains


def _filesystem_type(text: str) -> str:
    """``any``, ``mount``, or a type as /proc/self/mountinfo has it (``fuse.glusterfs``), or its beginning (``nfs``)."""
    if re.fullmatch(r"[A-Za-z0-9_.-]+", text):
        return text
    raise UsageError(f"'{text}' is no type of filesystem: write lustre, nfs, mount (whatever is mounted there) or any")


def _prefault(text: str) -> int:
    """Bytes; -1 for ``auto``."""
    words = {"auto": -1, "off": 0}
    return words[text] if text in words else sizes.parse_size(text)


def _nice(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 99
    if not -20 <= value <= 19:
        raise UsageError(f"nice={text} is not from -20 to 19")
    if value < 0 and os.geteuid() != 0:
        raise UsageError(f"nice={text}: only root can give the mount precedence")
    return value


OPTIONS: dict[str, Option] = {
    "memory": Option("memory", _memory),
    "staging": Option("staging", parse_path),
    "nvme": Option("nvme", parse_path),
    "prefault": Option("prefault", _prefault),
    "nice": Option("nice", _nice),
    "spill": Option("spill", lambda text: text if text in ("auto", "off") else parse_path(text)),
    "nodes": Option("nodes", str),
    "node": Option("node", str),
    "job": Option("job", _job),
    "domains": Option("domains", _domains),
    "replicas": Option("replicas", _count(1, 8)),
    "listen": Option("listen", hostlist.split_host_port),
    "secret": Option("secret_file", parse_path),
    "catalogue": Option("catalogue", _endpoints),
    "node_timeout": Option("node_timeout_s", _seconds(0.5)),
    "fsync": Option("fsync", _one_of("returned", "partner", "pfs")),
    "route": Option("route", _one_of("partner", "direct", "auto")),
    "drain_workers": Option("drain_workers", _count(1, 256)),
    "drain_bandwidth": Option("drain_bandwidth", sizes.parse_rate),
    "keep_fast": Option("keep_fast", _count(0, 1_000_000)),
    "full_timeout": Option("full_timeout_s", _seconds(0)),
    "fsync_timeout": Option("fsync_timeout_s", _seconds(0)),
    "offline": Option("offline", _flag, "on"),
    "pfs_type": Option("pfs_type", _filesystem_type),
    "verify": Option("verify", _flag, "on"),
    "hide_xattrs": Option("hide_xattrs", _flag, "on"),
    "passthrough": Option("passthrough", _one_of("auto", "on", "off"), "on"),
    "supervisor": Option("supervisor", _one_of("auto", "on", "off"), "on"),
    "user": Option("user", str),
    "allow_other": Option("allow_other", _flag, "on"),
    "log_file": Option("log_file", parse_path),
    "log_level": Option("log_level", _one_of("debug", "info", "warning", "error")),
    "runtime_dir": Option("runtime_dir", parse_path),
}


def split_words(text: str) -> list[tuple[str, Value]]:
    """(key, value) of ``a=1,b,nodes=n[1,2]``, without what mount(8) and fstab(5) add. Raises ``UsageError``."""
    found: list[tuple[str, Value]] = []
    for item in hostlist.split_outside_brackets(text, ","):
        key, equals, value = item.partition("=")
        if key == "ro":
            raise UsageError(
                "a read-only mount is not supported: leave 'ro' out (read the PFS directory itself instead)"
            )
        if (key in MOUNT_WORDS and not (key == "user" and equals)) or key.startswith(("x-", "X-", "comment")):
            continue
        found.append((key, value if equals else True))
    return found


def _known(key: str, source: str) -> Option:
    option = OPTIONS.get(key)
    if option is None:
        hint = nearest(key, list(OPTIONS)) or ": see 'cachexfs mount --help' (items of one value are separated by ';')"
        raise UsageError(f"unknown option '{key}' {source}{hint}")
    return option


def _from_file(path: str) -> Iterator[tuple[str, str, str]]:
    source = f"in '{path}'"
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the configuration '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' is not TOML: {error}") from None
    for key, value in table.items():
        _known(key, source)
        if isinstance(value, bool):
            yield key, "on" if value else "off", source
        elif isinstance(value, int | float | str):
            yield key, str(value), source
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            yield key, ";".join(value), source
        else:
            raise UsageError(f"'{key}' {source} must be a string, a number, true, false or a list of strings")


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(ENV_FOREIGN) or variable == "CACHEXFS_CONFIG":
            continue
        key = variable.removeprefix(ENV_PREFIX).lower()
        _known(key, f"in the environment variable {variable}")
        if environ[variable] != "":
            yield key, environ[variable], f"in the environment variable {variable}"


def _from_flags(words: Sequence[tuple[str, Value]]) -> Iterator[tuple[str, str, str]]:
    for key, value in words:
        option = _known(key, "given with -o")
        if isinstance(value, str):
            yield key, value, "given with -o"
        elif option.bare is None:
            raise UsageError(f"option '{key}' needs a value: -o {key}=...")
        else:
            yield key, option.bare, "given with -o"


def load_options(
    pfs: str,
    mountpoint: str,
    flags: Sequence[str] = (),
    config_file: str | None = None,
    environ: Mapping[str, str] = os.environ,
    sloppy: bool = False,
) -> MountOptions:
    """The options of a mount: defaults < TOML file < environment ``CACHEXFS_*`` < ``flags`` (arguments of ``-o``).

    The file is ``config_file``, else ``-o config=FILE``, else ``$CACHEXFS_CONFIG``. With ``sloppy`` unknown keys in
    ``flags`` are ignored. Everything is checked that can be checked without touching the PFS or the mount point.
    Raises ``UsageError``.
    """
    words = [word for text in flags for word in split_words(text)]
    named = [value for key, value in words if key == "config" and isinstance(value, str)]
    words = [word for word in words if word[0] != "config" and (word[0] in OPTIONS or not sloppy)]
    path = config_file or (named[-1] if named else environ.get("CACHEXFS_CONFIG"))
    values: dict[str, object] = {}
    given: dict[str, str] = {}
    raw = list(_from_file(path)) if path else []
    for key, text, source in [*raw, *_from_environment(environ), *_from_flags(words)]:
        option = OPTIONS[key]
        try:
            values[option.field] = option.parse(text)
        except UsageError as error:
            raise UsageError(f"option '{key}' {source}: {error}") from None
        given[key] = str(values[option.field]) if option.parse is parse_path else text
    if "job" not in given and (job := launcher_job(environ)):  # a later shell is not of that job
        given["job"] = job
    values["words"] = tuple(f"{key}={text}" for key, text in given.items())
    values.setdefault("memory", _memory(MEMORY_SHARE_DEFAULT))
    return _resolve(values, parse_path(pfs), parse_path(mountpoint), environ)


def _resolve(values: dict[str, object], pfs: str, mountpoint: str, environ: Mapping[str, str]) -> MountOptions:
    addresses = parse_nodes(str(values.pop("nodes", "")))
    node = own_name(addresses, str(values.pop("node", "")), environ)
    explicit_job = values.pop("job", None)
    job = str(explicit_job) if explicit_job else launcher_job(environ) or derived_job(pfs, mountpoint, addresses)
    addresses = with_ports(addresses, derived_port(job))
    listen = values.pop("listen", ("", 0))
    assert isinstance(listen, tuple)
    host, port = str(listen[0]), int(listen[1])
    if len(addresses) > 1:
        own = next(address for address in addresses if address.name == node)
        host = host or listen_host(own, addresses)
        port = port or own.port
    values.setdefault("nice", NICE_OF_ROOT if os.geteuid() == 0 else 0)
    if int(str(values.get("prefault", -1))) < 0:
        values["prefault"] = min(int(str(values["memory"])) // PREFAULT_PART, PREFAULT_BYTES_MAX)
    values.setdefault("fsync", "partner" if len(addresses) > 1 else "pfs")
    user = resolve_user(str(values.pop("user", "")))
    values |= {"uid": user[0] if user else None, "gid": user[1] if user else None}
    if user is not None and not environ.get("CACHEXFS_RUNTIME_DIR"):
        values.setdefault("runtime_dir", default_runtime_dir_for(user))
    values["runtime_dir"] = values.get("runtime_dir") or default_runtime_dir(environ)
    values |= {"pfs": pfs, "mountpoint": mountpoint, "nodes": addresses, "node": node, "job": job}
    values |= {"listen_host": host, "listen_port": port}
    options = msgspec.convert(values, MountOptions)
    _check_together(options)
    return options


def _check_together(options: MountOptions) -> None:
    if options.pfs == options.mountpoint or options.mountpoint.startswith(options.pfs.rstrip("/") + "/"):
        raise UsageError(f"the mount point '{options.mountpoint}' lies in the PFS directory: choose another")
    if options.pfs.startswith(options.mountpoint.rstrip("/") + "/"):
        raise UsageError(f"the PFS directory lies below the mount point '{options.mountpoint}': choose another")
    if options.uid is not None and options.supervisor == "off":
        raise UsageError("user= needs the supervisor, which keeps what mounting needs: leave supervisor=off out")
    if options.secret_file is not None:
        check_secret_file(options.secret_file)
    if options.alone:
        return
    count = len(options.nodes)
    if options.secret_file is None:
        raise UsageError(
            f"{count} nodes need a shared secret: create a file once (head -c 32 /dev/urandom), copy it to every node, "
            "mode 0600, and give secret=FILE"
        )
    if options.nvme is None:
        raise UsageError(
            f"{count} nodes need nvme=DIR: a directory on this node's own disk, for replicas held for others"
        )
    if options.replicas >= count:
        raise UsageError(
            f"replicas={options.replicas} needs at least {options.replicas + 1} nodes, and there are {count}"
        )
