# Sourced by the other tools, from the root of the checkout: makes .venv/ there and installs ckpt into it.
#
# Safe to rerun: a stamp of what was installed makes the next run quick. A CUDA build of torch in the python that is
# active now is used as it is. CKPT_PYTHON=/path/to/python picks the interpreter.
# shellcheck shell=bash

ckpt_say() { printf '== %s\n' "$*" >&2; }

# True for a python of at least 3.11 (and at most $2, if given) that can make virtual environments.
ckpt_usable_python() {
    "$1" -c '
import ensurepip, sys, venv
newest = tuple(map(int, (sys.argv[1:] or ["9.9"])[0].split(".")))
sys.exit(not (3, 11) <= sys.version_info[:2] <= newest)' "${@:2}" >/dev/null 2>&1
}

# Prints "VERSION FOLDER" of a torch (2.6 or newer) that was built for a GPU and that $1 can import; torch itself is
# not imported, because that is slow.
ckpt_gpu_torch() {
    "$1" -c '
import importlib.util, pathlib, runpy
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    home = pathlib.Path(spec.origin).parent
    facts = runpy.run_path(str(home / "version.py"))
    version = str(facts["__version__"])
    enough = tuple(map(int, version.split(".")[:2])) >= (2, 6)
    if enough and (facts.get("cuda") or facts.get("hip")):
        print(version, home.parent)' 2>/dev/null || true
}

# Prints the python to build on: the one asked for, one that has a GPU torch, or the newest that all pinned packages
# have wheels for (3.13 to 3.11), or else any that is new enough.
ckpt_find_python() {
    local candidate
    if [[ -n "${CKPT_PYTHON:-}" ]]; then
        ckpt_usable_python "$CKPT_PYTHON" && { printf '%s\n' "$CKPT_PYTHON"; return; }
        ckpt_say "CKPT_PYTHON=$CKPT_PYTHON is not a Python 3.11 or newer with venv and ensurepip"
        return 1
    fi
    for candidate in python python3; do
        if ckpt_usable_python "$candidate" && [[ -n "$(ckpt_gpu_torch "$candidate")" ]]; then
            command -v "$candidate"
            return
        fi
    done
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        ckpt_usable_python "$candidate" 3.13 && { command -v "$candidate"; return; }
    done
    for candidate in python3.14 python3 python /usr/bin/python3.1[1-9]; do
        ckpt_usable_python "$candidate" && { command -v "$candidate"; return; }
    done
    ckpt_say "no Python 3.11 or newer with venv and ensurepip found; install one or set CKPT_PYTHON"
    return 1
}

# What was installed depends on these files; the compiled kernels are part of it.
ckpt_stamp() { find pyproject.toml tools/constraints.txt tools/setup.sh cuda_ext -type f -print0 | sort -z |
    xargs -0 cat | .venv/bin/python -c '
import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

# Makes .venv/ on $1, so that it sees a GPU torch that $1 has.
ckpt_make_venv() {
    local found torch_home=""
    found="$(ckpt_gpu_torch "$1")"
    if [[ -z "$found" ]]; then
        "$1" -m venv .venv
        return
    fi
    torch_home="${found#* }"
    if "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        # $1 is itself in a virtual environment; --system-site-packages would show its base, not it.
        "$1" -m venv .venv
        .venv/bin/python -c '
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "own_torch.pth").write_text(sys.argv[1] + "\n")' "$torch_home"
    else
        "$1" -m venv --system-site-packages .venv
    fi
}

ckpt_install() {
    local found constraints=.venv/constraints.txt
    found="$(ckpt_gpu_torch .venv/bin/python)"
    if [[ -n "$found" && "${found#* }" != "$(pwd -P)/.venv/"* ]]; then
        ckpt_say "keeping your torch ${found%% *} in ${found#* }"
        { grep -v '^torch==' tools/constraints.txt; echo "torch==${found%% *}"; } >"$constraints"
    else
        cp tools/constraints.txt "$constraints"
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" -e '.[megatron,test,dev]'
}

ckpt_setup() {
    local base
    if [[ -x .venv/bin/python ]] && .venv/bin/python -c '' 2>/dev/null; then
        if [[ "$(cat .venv/ckpt-stamp 2>/dev/null)" == "$(ckpt_stamp)" ]]; then
            ckpt_say "using .venv ($(.venv/bin/python --version)), already set up"
            return
        fi
        ckpt_say "updating .venv ($(.venv/bin/python --version))"
    else
        base="$(ckpt_find_python)" || return 1
        ckpt_say "making .venv with $("$base" --version) from $base"
        rm -rf .venv
        ckpt_make_venv "$base" || return 1
    fi
    rm -f .venv/ckpt-stamp
    ckpt_say "installing ckpt and its tested dependencies (some minutes the first time)"
    if ! ckpt_install; then
        ckpt_say "the installation failed; see the message of pip above, then run this again"
        return 1
    fi
    ckpt_stamp >.venv/ckpt-stamp
}

ckpt_setup
