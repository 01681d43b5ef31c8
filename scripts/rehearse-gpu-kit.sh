#!/usr/bin/env bash
# rehearse-gpu-kit.sh KIT SHIM USER [ARGUMENT..]: runs gpu.py of the folder that gpu-kit.sh made, as on another machine: from
# a copy, as USER, with no network and without these sources, on the driver in SHIM (cuda-shim/driver/build.sh) and the tools
# of cuda-shim/tools. PYTHON names the python3, which must be outside of the sources; READONLY=1 makes the copy one that USER
# cannot write. Needs root, unshare and setpriv. The copy and its results stay, and are named at the end.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 KIT SHIM USER [ARGUMENT..]" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
kit=$1 shim=$2 user=$3
shift 3
copy=$(mktemp -d)
chmod 755 "$copy"
cp -r "$kit" "$copy/kit"
cp -r "$shim" "$copy/shim"
cp -r "$root/cuda-shim/tools" "$copy/tools"
# As after a transfer that keeps no permissions.
chmod -R a-x,a+rX "$copy/kit"
[ -n "${READONLY:-}" ] || chown -R "$user" "$copy/kit"
group=$(id -g "$user")
export copy root user group
export python=${PYTHON:-python3}
unshare --net --mount bash -c '
    set -e
    mount --make-rprivate /
    mount -t tmpfs none "$root"
    cd "$copy/kit"
    exec setpriv --reuid "$user" --regid "$group" --clear-groups env -i PATH="$copy/tools:/usr/bin:/bin" \
        LD_LIBRARY_PATH="$copy/shim" ${PYTHONPATH:+PYTHONPATH="$PYTHONPATH"} ${SHIM_SKIP:+SHIM_SKIP=1} ${ENGRAFT_KERNELS:+ENGRAFT_KERNELS="$ENGRAFT_KERNELS"} "$python" gpu.py "$@"
' rehearsal "$@" || code=$?
echo "$copy: exit code ${code:-0}"
exit "${code:-0}"
