#!/usr/bin/env bash
# Run the tests of tests/gpu on the NVIDIA GPU of this machine, within LIMIT seconds, what is installed included. The builds of PyTorch and ONNX
# Runtime for CUDA and TensorRT go into .gpu/, where the two samples are trained meanwhile; vLLM goes into .gpu-vllm/. What is not there in time is
# not run, and said so. Without a GPU nothing is run, and the end is 0.
#
#   PYTHON      makes the environments; by default python3
#   GPU_PYTHON  an environment that has all of it already, slipway-ml too; then nothing is installed
#   LIMIT       480 seconds by default
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
LIMIT=${LIMIT:-480}
place=$PWD/.gpu
export SLIPWAY_TEST_GPU_DEADLINE=$(($(date +%s) + LIMIT)) SLIPWAY_TEST_GPU_FOLDER=$place
unset UV_TORCH_BACKEND # the Makefile sets it to PyTorch's build for CPUs

gpus=$(nvidia-smi --list-gpus 2>/dev/null || true)
if [[ -z $gpus ]]; then
    echo "not run: nvidia-smi lists no GPU on this machine" >&2
    exit 0
fi
echo "$gpus"

jobs_of_this_run=()
end_jobs() {
    local job
    for job in "${jobs_of_this_run[@]}"; do kill "$job" 2>/dev/null || true; done
}
trap end_jobs EXIT

make_environment() { # FOLDER
    "$PYTHON" -P -m venv "$1" && "$1/bin/python" -P -m pip install --quiet --disable-pip-version-check uv
}
install() { # FOLDER REQUIREMENT…
    local folder=$1
    shift
    "$folder/bin/uv" pip install --quiet --python "$folder/bin/python" "$@"
}

mkdir -p "$place"
python=${GPU_PYTHON:-$place/environment/bin/python}
if [[ -z ${GPU_PYTHON:-} && ! -e $place/.installed ]]; then
    make_environment "$place/environment"
    install "$place/environment" -c constraints.txt -e '.[all,dev]' nvidia-ml-py
fi
train() { # NAME OPTION…
    local name=$1
    shift
    [[ -e $place/samples/$name/sample.json ]] || "$(dirname "$python")/slipway" sample "$place/samples/$name" "$@" >"$place/$name.log" 2>&1
}
train small &
jobs_of_this_run+=($!)
train real --real &
jobs_of_this_run+=($!)
if [[ -z ${GPU_PYTHON:-} && ! -e $place/.installed ]]; then
    # The two builds of ONNX Runtime are one module: see docs/onnx.md. PyTorch pins libraries that both need.
    "$place/environment/bin/uv" pip uninstall --quiet --python "$python" onnxruntime
    install "$place/environment" -c constraints.txt -e '.[onnxruntime-gpu]' || echo "not installed: onnxruntime-gpu" >&2
    install "$place/environment" -c constraints.txt -e '.[tensorrt]' || echo "not installed: tensorrt" >&2
    touch "$place/.installed"
fi
install_vllm() {
    local folder=$PWD/.gpu-vllm
    [[ ! -e $folder/.installed ]] || return 0
    rm -rf "$folder"
    make_environment "$folder" && install "$folder" vllm && touch "$folder/.installed"
}
if [[ -z ${GPU_PYTHON:-} ]]; then
    install_vllm >"$place/vllm.log" 2>&1 &
    jobs_of_this_run+=($!)
fi

left=$((SLIPWAY_TEST_GPU_DEADLINE - $(date +%s)))
echo "installed with $left of $LIMIT seconds left"
if ((left < 1)); then
    echo "not run: installing took all of the time; a second run finds what the first has made" >&2
    exit 0
fi
timeout --signal=INT "$left" "$python" -P -m pytest -p no:randomly -p no:cacheprovider --override-ini addopts= --import-mode=importlib -rs -v tests/gpu
