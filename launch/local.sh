#!/usr/bin/env bash
# Starts N processes of one run on this machine, joined as the hosts of a pod are.
#
#   launch/local.sh [--devices D] [--gpus] [--port P] [--dry-run] N -- ARGUMENTS OF sspjax.train
#
#   --devices D  devices of each process: CPU devices, or GPUs with --gpus (default 1)
#   --gpus       process i gets GPUs i*D .. i*D+D-1; without it everything runs on the CPU
#   --port P     port of the coordinator (default: a free one)
#   --dry-run    print the commands and start nothing
#
# PYTHON names the interpreter (default: python). Each output line carries its process's number;
# the first process that fails ends the others, and its exit code is the script's.
set -euo pipefail
# shellcheck source=launch/show.sh
source "$(dirname "${BASH_SOURCE[0]}")/show.sh"

devices=1 gpus=false port="" dry_run=false
while [[ $# -gt 0 && $1 == --* ]]; do
  case $1 in
    --devices) devices=${2:?--devices needs a number}; shift 2 ;;
    --gpus) gpus=true; shift ;;
    --port) port=${2:?--port needs a number}; shift 2 ;;
    --dry-run) dry_run=true; shift ;;
    *) usage "$0" ;;
  esac
done
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ && $2 == -- ]] || usage "$0"
count=$1
shift 2

python=${PYTHON:-python}
if [[ -z $port ]]; then
  port=$("$python" -c 'import socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1])')
fi

# Sets `variables` to the environment of process $1.
set_variables() {
  variables=(
    "SSPJAX_COORDINATOR=127.0.0.1:$port"
    "SSPJAX_NUM_PROCESSES=$count"
    "SSPJAX_PROCESS_ID=$1"
  )
  if $gpus; then
    local first=$(($1 * devices))
    variables+=("CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + devices - 1)))")
  else
    variables+=("JAX_PLATFORMS=cpu" "JAX_NUM_CPU_DEVICES=$devices")
  fi
}

if $dry_run; then
  for ((i = 0; i < count; i++)); do
    set_variables "$i"
    show env "${variables[@]}" "$python" -m sspjax.train "$@"
  done
  exit 0
fi

children=()

running() {
  [[ ${#children[@]} -gt 0 ]] && kill -0 "${children[@]}" 2>/dev/null
}

# A process of a joined group may hold SIGTERM back to finish its step; it gets ten seconds.
end_all() {
  [[ ${#children[@]} -gt 0 ]] || return 0
  kill "${children[@]}" 2>/dev/null || true
  for ((tenth = 0; tenth < 100; tenth++)); do
    running || break
    sleep 0.1
  done
  kill -9 "${children[@]}" 2>/dev/null || true
}

trap end_all EXIT
trap 'exit 130' INT TERM
for ((i = 0; i < count; i++)); do
  set_variables "$i"
  env "${variables[@]}" "$python" -m sspjax.train "$@" > >(sed -u "s/^/[$i] /") 2>&1 &
  children+=($!)
done
while [[ ${#children[@]} -gt 0 ]]; do
  for i in "${!children[@]}"; do
    kill -0 "${children[i]}" 2>/dev/null && continue
    code=0
    wait "${children[i]}" || code=$?
    unset "children[i]"
    if [[ $code -ne 0 ]]; then
      echo "process $i failed with exit code $code: ending the others" >&2
      exit "$code"
    fi
  done
  sleep 0.1
done
