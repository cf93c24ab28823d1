#!/bin/sh
# Sets up .venv-speculators: the package `speculators`, whose models are the reference for heads, and dynaspec beside it.
# Used by `make test-hosts`.
#
# It asks for torchvision and torchaudio, which its models do not import and which would bring another torch, so its
# other requirements are named here.
set -eu

python=${1:?usage: setup.sh PYTHON}
version=0.9.0
venv=.venv-speculators

pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

"$python" -m venv "$venv"
pip install 'torch==2.13.0' 'transformers==5.19.0' datasets httpx loguru openai psutil pydantic-settings 'pytest>=8.3'
pip install --no-deps "speculators==$version" "hs-connectors==$version"
pip install -e .
touch "$venv/ready"
