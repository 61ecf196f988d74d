#!/usr/bin/env bash
# Builds drot in place on a machine with a GPU, and runs the CUDA tests, every benchmark and
# compute-sanitizer. It takes at most 9 minutes and installs nothing.
#
#   benchmarks/on_gpu.sh [FOLDER]     logs and CSV rows go to FOLDER (default: $OUT if it is set, otherwise gpu-results)
#
# PYTHON (default python3) must have a CUDA torch, transformers, cmake and ninja; nvcc must be on PATH.
# If a stage fails, the next stages still run. Exit status: 0 all passed, 1 a stage failed, 2 no GPU.
set -uo pipefail

folder=${1:-${OUT:-gpu-results}}
mkdir -p "$folder" || exit 1
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
deadline=$((SECONDS + 530))
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
export DROT_CACHE=$folder  # keeps the tuning cache, the fastest algorithm of each product, as a result

arch=$("$python" - <<'EOF'
import torch
if torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    print(f"{major}.{minor}")
EOF
) || { echo "on_gpu.sh: $python cannot import torch; name one that can: PYTHON=... $0" >&2; exit 2; }
if [[ -z $arch ]]; then
  echo "on_gpu.sh: no GPU found ($("$python" -c 'import torch; print("torch", torch.__version__)') finds no CUDA device); nothing was run" >&2
  exit 2
fi

failed=0
summary() { printf '%-8s %5s s  %s\n' "$@" | tee -a "$folder/summary.txt"; }

# stage NAME SECONDS COMMAND...: runs a command for at most SECONDS, with its output in NAME.log
stage() {
  local name=$1 limit=$2 start=$SECONDS left=$((deadline - SECONDS)) status
  shift 2
  if ((left < 5)); then
    summary "NO TIME" 0 "$name"
    failed=1
    return 1
  fi
  timeout --kill-after=5 $((limit < left ? limit : left)) "$@" > "$folder/$name.log" 2>&1
  status=$?
  case $status in
    0) summary passed $((SECONDS - start)) "$name" ;;
    124 | 137) summary TIMEOUT $((SECONDS - start)) "$name" ;;
    *) summary FAILED $((SECONDS - start)) "$name" ;;
  esac
  if ((status)); then
    tail -n 25 "$folder/$name.log" | sed 's/^/    /'
    failed=1
  fi
  return $status
}

: > "$folder/summary.txt"
stage build 170 env DROT_WITH_CUDA=1 TORCH_CUDA_ARCH_LIST="$arch" "$python" setup.py build_ext --inplace
if ! stage import 60 "$python" -c '
import json
from drot.machine.environment import collect
info = collect()
print(json.dumps(info, indent=2))
assert "cuda" in info["backends"], "drot was built without CUDA: " + str(info["no_cuda_reason"])'; then
  echo "on_gpu.sh: drot does not load with CUDA, so no further stage runs" >&2
  exit 1
fi
stage check_ops 60 "$python" benchmarks/check_ops.py --device cuda

if "$python" -c 'import pytest' 2> /dev/null; then
  stage tests 150 "$python" -m pytest tests -k cuda --continue-on-collection-errors \
    --ignore tests/pipeline/test_goldens.py --ignore tests/cli --durations=10
else
  summary skipped 0 "tests: pytest is not installed; check_ops ran each op against its reference"
fi

stage measure 60 "$python" -m drot info --measure --device cuda
bench() { stage "bench_$1" 75 "$python" "benchmarks/bench_$1.py" --device cuda --repeats 20 --csv "$folder"; }
# what has an aim on a GPU comes first
bench entropy_loss
bench pruned_importance
prune_layer() {
  local shape=$1
  shift
  stage "bench_prune_layer-$shape" 120 "$python" benchmarks/bench_prune_layer.py --device cuda --shape "$shape" "$@" --csv "$folder"
}
prune_layer llama-3-8b
prune_layer llama-3-70b --repeats 1 --paper-steps 2
stage optimizers 60 "$python" benchmarks/optimizers.py --device cuda --synthetic 256 512 1024 2048 --steps 60 --csv "$folder"
for file in benchmarks/bench_*.py; do
  name=$(basename "$file" .py)
  [[ -e $folder/$name.log || $name == bench_prune_layer ]] || bench "${name#bench_}"
done

if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null); then
  for tool in memcheck racecheck; do
    stage "$tool" 90 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" benchmarks/check_ops.py --device cuda
  done
else
  summary skipped 0 "memcheck, racecheck: compute-sanitizer is not installed"
fi

for log in "$folder"/bench_*.log; do grep -H -E 'target|slower' "$log" | sed "s|^$folder/||"; done
exit $failed
