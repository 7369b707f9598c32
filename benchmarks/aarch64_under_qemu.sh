#!/usr/bin/env bash
# Runs the aarch64 MindSpore from PyPI on the aarch64 stand-in, under qemu-user: the proof that the stand-in is right on the
# architecture of most Ascend hosts, on a machine of another one. About 2 minutes of CPU time and 3 GB of disk.
#   apt-get install qemu-user;   bash benchmarks/aarch64_under_qemu.sh WORK_FOLDER [PYTHON]
# The program is nn.Dense(8192, 8192) with Adam: weight, gradient and two states of 256M each, so 1024M must be counted.
set -euo pipefail
WORK=$(mkdir -p "$1" && cd "$1" && pwd)
PYTHON=${2:-python3}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VERSION=2.7.1
if [ ! -d "$WORK/root" ]; then
    mkdir -p "$WORK/deb"
    dpkg --add-architecture arm64 && apt-get update -qq
    trap 'dpkg --remove-architecture arm64' EXIT
    (cd "$WORK/deb" && apt-get download -qq libc6:arm64 python3.11-minimal:arm64 libpython3.11-minimal:arm64 \
        libpython3.11-stdlib:arm64 libexpat1:arm64 zlib1g:arm64 libssl3:arm64 libffi8:arm64 libbz2-1.0:arm64 liblzma5:arm64 \
        libstdc++6:arm64 libgcc-s1:arm64 libgomp1:arm64 libuuid1:arm64 libcrypt1:arm64 libsqlite3-0:arm64 libnuma1:arm64)
    for package in "$WORK"/deb/*.deb; do dpkg -x "$package" "$WORK/root"; done
fi
if [ ! -d "$WORK/site/mindspore" ]; then
    "$PYTHON" -m pip install --quiet --target "$WORK/site" --implementation cp --python-version 311 --only-binary :all: \
        --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 --platform any \
        'numpy<2' protobuf asttokens pillow 'scipy<1.16' packaging psutil astunparse safetensors dill
    "$PYTHON" -m pip download --quiet --no-deps --dest "$WORK/wheel" --python-version 311 --only-binary :all: \
        --platform manylinux1_aarch64 --platform any "mindspore==$VERSION"
    "$PYTHON" -m zipfile -e "$WORK"/wheel/mindspore-*.whl "$WORK/site"
fi
export MINDSPEED_DRYRUN_CACHE=$WORK/cache
ENVIRONMENT=$(PYTHONPATH=$ROOT "$PYTHON" - "$WORK" <<P
import sys
from pathlib import Path
from mindspeed_dryrun.engines.cann.stand_in import stand_in_for
work = sys.argv[1]
stand_in = stand_in_for(Path(work, "site/mindspore"), "$VERSION")
paths = stand_in.search_paths()
environ = stand_in.variables() | {
    "MS_SIMULATION_LEVEL": "1", "GLOG_v": "2", "MS_DEV_LAUNCH_BLOCKING": "1", "RANK_ID": "3", "RANK_SIZE": "8",
    "LD_LIBRARY_PATH": ":".join([*paths["LD_LIBRARY_PATH"], f"{work}/root/lib/aarch64-linux-gnu", f"{work}/root/usr/lib/aarch64-linux-gnu"]),
    "PYTHONPATH": ":".join([f"{work}/site", *paths["PYTHONPATH"]]),
    "PATH": ":".join([*paths["PATH"], "/usr/bin", "/bin"]),
}
print(" ".join(f"-E {name}={value}" for name, value in environ.items()))
P
)
cd "$WORK"
# shellcheck disable=SC2086 — one word per variable is meant
qemu-aarch64 -L "$WORK/root" $ENVIRONMENT "$WORK/root/usr/bin/python3.11" -c '
import platform, mindspore as ms
from mindspore import mint, nn
ms.set_device("Ascend")
net = nn.Dense(8192, 8192, has_bias=False)
adam = nn.Adam(net.trainable_params())
step = ms.value_and_grad(lambda x: net(x).sum(), None, adam.parameters)
loss, gradients = step(mint.ones((1, 8192)))
adam(gradients)
print("ran on", platform.machine())
' 2>&1 | grep -E 'ran on|memory|Error'
