#!/usr/bin/env bash
# Serves a checkpoint that drot wrote by vLLM, and asks it for a few tokens. The server then goes on until
# Ctrl-C:
#   examples/serve_vllm.sh CHECKPOINT [RANKS [OPTIONS of vllm serve]]
#
# NOT YET RUN BY US ON A GPU. What was tested on a CPU, with vLLM 0.32.0, is in docs/deploy.md, section "In
# vLLM".
#
# drot must be built with the torch that vLLM brings, so vLLM comes first:
#   pip install 'vllm==0.32.0' 'setuptools>=78.1.1,<81' cmake ninja
#   DROT_WITH_CUDA=1 pip install --no-build-isolation .
set -euo pipefail

checkpoint=${1:?usage: examples/serve_vllm.sh CHECKPOINT [RANKS]}
ranks=${2:-1}
port=${PORT:-8000}

# The option --enforce-eager takes torch.compile and CUDA graphs out of a first try.
vllm serve "$checkpoint" --served-model-name drot --tensor-parallel-size "$ranks" --port "$port" "${@:3}" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT

until curl --silent --fail "http://127.0.0.1:$port/health" >/dev/null; do
  kill -0 "$server" # ends the script if the server has ended
  sleep 2
done
curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header 'Content-Type: application/json' \
  --data '{"model": "drot", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'
echo
wait "$server"
