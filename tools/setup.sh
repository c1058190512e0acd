#!/bin/bash
# setup.sh system|test-system|slurm|venv|prefix   makes a bare Debian machine able to build and run the project; no-op where it is
# already. Called by the Makefile. Root, or a user who may sudo, is needed only where a package is missing.
#   PYTHON  the interpreter for the virtual environment (default: the first of python3, python3.14 ... python3.11 that is 3.11+)
#   VENV    where that is (.venv; of prefix: the directory to install in)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
STAMPS=.make
export DEBIAN_FRONTEND=noninteractive PATH=$PATH:/usr/sbin:/sbin

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# patiently WHAT COMMAND...: says at once what goes on, and every 10 s for how long (the ticker ends with this script).
patiently() {
  local what=$1 begin=$SECONDS status=0 ticker
  shift
  say "$what"
  ( while sleep 10 && kill -0 $$ 2>/dev/null; do say "$what: $((SECONDS - begin)) s so far"; done ) &
  ticker=$!
  "$@" || status=$?
  kill $ticker 2>/dev/null || true
  wait $ticker 2>/dev/null || true
  return $status
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "needs root for: $* (run as root, or install sudo)"; fi
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v "$candidate"; return; fi
  done
  return 1
}

has_headers() { "$1" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'; }

# install PACKAGE...: without starting their services (the daemon runs its own etcd, the tests their own slurmd).
install() {
  command -v apt-get >/dev/null || die "this is not Debian: install the equivalents of: $*"
  local policy=/usr/sbin/policy-rc.d made=
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null
    as_root chmod 755 $policy
    made=1
  fi
  local status=0
  patiently "installing the system packages $*" apt_install "$@" || { patiently "updating the package lists" as_root apt-get -qq update && patiently "installing $*" apt_install "$@"; } || status=$?
  [ -z "$made" ] || as_root rm -f $policy
  [ "$status" = 0 ] || die "apt-get could not install: $*"
}
apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 \
    install "$@" </dev/null >/dev/null
}

# need COMMAND PACKAGE: PACKAGE is missing if COMMAND is.
missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }

system() {
  need fusermount3 fuse3; need etcd etcd-server; need getfattr attr; need ip iproute2; need openssl openssl; need cc gcc
  need mount mount; need pkg-config pkg-config
  [ -e /usr/include/fuse3/fuse.h ] || missing+=(libfuse3-dev)
  [ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
  local python; python=$(find_python) || missing+=(python3 python3-dev python3-venv)
  if [ -n "$python" ] && ! has_headers "$python" && [[ $(readlink -f "$python") == /usr/bin/* ]]; then missing+=(python3-dev); fi
}
slurm() { need slurmctld slurm-wlm; need munged munge; }
# Some tests mount as a user who is not root. Where udev runs, it lets everybody open the device.
open_fuse() {
  if [ -e /dev/fuse ] && [ "$(stat -c %a /dev/fuse)" != 666 ]; then
    say "letting all users open /dev/fuse, as udev does"
    as_root chmod 666 /dev/fuse || say "that failed: tests that mount without root will fail"
  fi
}

shared_filesystems() {
  need glusterfsd glusterfs-server; need glusterfs glusterfs-client; need mkfs.xfs xfsprogs; need chattr e2fsprogs
  need mfsmaster moosefs-master; need mfschunkserver moosefs-chunkserver; need mfsmount moosefs-client
}
finish() {
  [ ${#missing[@]} = 0 ] && return
  local etcd_was; etcd_was=$(command -v etcd || true)
  install "${missing[@]}"
  if [ -z "$etcd_was" ] && command -v systemctl >/dev/null; then as_root systemctl disable --now etcd >/dev/null 2>&1 || true; fi
}

make_venv() {
  local python=$1
  "$python" -m venv "$VENV" >/dev/null 2>&1 && return
  rm -rf "$VENV"
  "$python" -m virtualenv -q "$VENV" 2>/dev/null && return
  say "$python has no venv module"
  if [[ $(readlink -f "$python") == /usr/bin/* ]] && command -v apt-get >/dev/null; then
    ( install python3-venv ) && "$python" -m venv "$VENV" && return
    rm -rf "$VENV"
  fi
  rm -rf $STAMPS/virtualenv
  "$python" -m pip install -q --target $STAMPS/virtualenv virtualenv && PYTHONPATH=$STAMPS/virtualenv "$python" -m virtualenv -q "$VENV"
}

# The environment is made again when the requirements in pyproject.toml or the interpreter change, not at every edit of it.
venv() {
  mkdir -p $STAMPS
  local python wanted; python=$(find_python) || die "no Python 3.11 or later: apt-get install python3, or give PYTHON="
  wanted=$("$python" - <<'PY'
import hashlib, json, sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print(hashlib.sha256(json.dumps([sys.version, project["build-system"], project["project"], project["tool"]["setuptools"]], sort_keys=True).encode()).hexdigest())
PY
  )
  if [ -x "$VENV/bin/python" ] && [ "$(cat $STAMPS/venv 2>/dev/null)" = "$wanted" ]; then return; fi
  [ -x "$VENV/bin/python" ] || patiently "making the virtual environment $VENV" make_venv "$python" || die "cannot make a virtual environment with $python"
  patiently "installing the Python packages into $VENV (PyTorch is one of them: over 1 GB)" \
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check -e '.[dev]' </dev/null || die "pip failed (no network?)"
  echo "$wanted" >$STAMPS/venv
}

# Root installs for all users: an interpreter below root's home would be nobody else's.
runs_for_all() {
  [ "$(id -u)" != 0 ] || setpriv --reuid=65534 --regid=65534 --clear-groups "$(readlink -f "$1")" -c '' 2>/dev/null
}
prefix() {
  local python candidate; python=$(find_python) || die "no Python 3.11 or later: apt-get install python3, or give PYTHON="
  if ! runs_for_all "$python"; then
    [ -z "${PYTHON:-}" ] || die "other users cannot run $python ($(readlink -f "$python")): give another PYTHON="
    candidate=$(PYTHON=/usr/bin/python3 find_python) && runs_for_all "$candidate" ||
      die "other users cannot run $python ($(readlink -f "$python")), and /usr/bin/python3 is not 3.11 or later: give PYTHON="
    say "other users cannot run $python: taking $candidate"
    python=$candidate
    if ! has_headers "$python"; then ( install python3-dev python3-venv ); fi
  fi
  [ -x "$VENV/bin/python" ] && runs_for_all "$VENV/bin/python" || { rm -rf "$VENV/bin/python"*; make_venv "$python"; } ||
    die "cannot make a virtual environment with $python"
  patiently "installing into $VENV, with $python" \
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check --upgrade . </dev/null || die "pip failed (no network?)"
}

case ${1:-} in
  system) system; finish ;;
  test-system) system; need strace strace; slurm; shared_filesystems; finish; open_fuse ;;
  slurm) slurm; finish ;;
  venv) venv ;;
  prefix) prefix ;;
  *) sed -n 2,6p "$0"; exit 2 ;;
esac
