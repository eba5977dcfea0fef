#!/usr/bin/env bash
# One run on a Cloud TPU VM pod, from creation to deletion.
#
#   launch/tpu_vm.sh [--dry-run] create NAME ZONE TYPE [GCLOUD OPTIONS, such as --spot]
#   launch/tpu_vm.sh [--dry-run] setup  NAME ZONE
#   launch/tpu_vm.sh [--dry-run] run    NAME ZONE -- ARGUMENTS OF sspjax.train
#   launch/tpu_vm.sh [--dry-run] logs   NAME ZONE
#   launch/tpu_vm.sh [--dry-run] delete NAME ZONE
#
#   create  makes a pod of TYPE, such as v5p-64; the runtime version follows from the type
#   setup   copies the checkout's last commit to every host and installs it into ~/sspjax/.venv
#   run     starts the same command on every host, in the background; it finds its peers itself
#   logs    follows what host 0 writes
#   delete  deletes the pod and everything on its disks
#
# Run it from the checkout. --dry-run prints the commands and runs nothing. The project is
# gcloud's current one. The workdir in ARGUMENTS must be a folder that every host sees, such as a
# mounted bucket.
set -euo pipefail
# shellcheck source=launch/show.sh
source "$(dirname "${BASH_SOURCE[0]}")/show.sh"

# What every host is told to do; ~ is the home folder over there.
INSTALL='mkdir -p ~/sspjax && tar -xzf /tmp/sspjax.tar.gz -C ~/sspjax && cd ~/sspjax'
# The images come with an older Python than the package needs; uv brings its own.
INSTALL+=' && python3 -m pip install --quiet --user uv'
INSTALL+=' && ~/.local/bin/uv venv --quiet --allow-existing --python 3.11 .venv'
INSTALL+=' && ~/.local/bin/uv pip install --quiet --python .venv/bin/python -e ".[tpu]"'
START='SSPJAX_DISTRIBUTED=auto JAX_COMPILATION_CACHE_DIR=~/.cache/sspjax'
START+=' nohup .venv/bin/python -m sspjax.train'

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
  dry_run=true
  shift
fi
[[ $# -ge 3 ]] || usage "$0"
action=$1 name=$2 zone=$3
shift 3

call() {
  if $dry_run; then show "$@"; else "$@"; fi
}

# Runs the shell command $2 on the hosts $1: all, or one by its number.
on_hosts() {
  call gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"
}

runtime_version() {
  case $1 in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *)
      echo "TYPE=$1: expected v4-*, v5litepod-*, v5p-* or v6e-*" >&2
      exit 2
      ;;
  esac
}

create() {
  [[ $# -ge 1 ]] || usage "$0"
  local type=$1 version
  shift
  version=$(runtime_version "$type")
  call gcloud compute tpus tpu-vm create "$name" --zone="$zone" \
    --accelerator-type="$type" --version="$version" "$@"
}

setup() {
  call git archive --format=tar.gz --output=/tmp/sspjax.tar.gz HEAD
  call gcloud compute tpus tpu-vm scp /tmp/sspjax.tar.gz "$name:/tmp/" --zone="$zone" --worker=all
  on_hosts all "$INSTALL"
}

run() {
  [[ $# -ge 2 && $1 == -- ]] || usage "$0"
  shift
  on_hosts all "cd ~/sspjax && { $START $(show "$@") >> ~/sspjax.log 2>&1 < /dev/null & }"
}

logs() {
  on_hosts 0 'tail -n 100 -F ~/sspjax.log'
}

delete() {
  call gcloud compute tpus tpu-vm delete "$name" --zone="$zone" --quiet
}

case $action in
  create | setup | run | logs | delete) "$action" "$@" ;;
  *) usage "$0" ;;
esac
