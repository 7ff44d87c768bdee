#!/usr/bin/env bash
# One server over two nodes; the same command on both, NODE_RANK differs:
#
#     launch/two_node.sh RANK0_ADDR NODE_RANK MODEL [flags of rocm-serve serve]
#
# RANK0_ADDR is an address of node 0 that node 1 reaches. FABRIC=cx7|thor2|ainic picks the preset of launch/fabric for
# the network cards; a variable that is set already is kept. Flags given here come after the production flags and win.
# PORT0 (29500) is the first of the four ports that the nodes use among themselves.
set -euo pipefail

fail() {
  echo "two_node.sh: $*" >&2
  exit 2
}

[[ $# -ge 3 ]] || fail "usage: launch/two_node.sh RANK0_ADDR NODE_RANK MODEL [flags of rocm-serve serve]"
rank0_addr=$1 node_rank=$2 model=$3
shift 3
[[ $node_rank == 0 || $node_rank == 1 ]] || fail "NODE_RANK $node_rank: legal: 0, 1"
case $rank0_addr in
  127.* | localhost | ::1)
    [[ -n ${ALLOW_LOOPBACK:-} ]] || fail "RANK0_ADDR $rank0_addr is this host's own loopback: node 1 cannot reach it"
    ;;
esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -n ${FABRIC:-} ]]; then
  preset=$here/fabric/$FABRIC.env
  [[ -r $preset ]] || fail "FABRIC=$FABRIC: legal: $(cd "$here/fabric" && echo *.env | sed 's/\.env//g')"
  while IFS='=' read -r name value; do
    [[ $name =~ ^[A-Z][A-Z0-9_]*$ && -z ${!name+set} ]] && export "$name=$value"
  done <"$preset"
fi

# Only where there are GPUs: what RDMA and RCCL need of the host, said before terabytes are read.
if [[ -e /dev/kfd ]]; then
  memlock=$(ulimit -l)
  [[ $memlock == unlimited ]] || fail "memlock is limited to $memlock KB: RDMA cannot pin memory; ulimit -l unlimited, or docker run --ulimit memlock=-1"
  shm_mb=$(df --output=avail -m /dev/shm | tail -1 | tr -d ' ')
  [[ $shm_mb -ge 8192 ]] || fail "/dev/shm has $shm_mb MB free, RCCL wants 8192; docker run --ipc host, or --shm-size 64G"
  if [[ ${NCCL_IB_DISABLE:-0} != 1 ]]; then
    compgen -G '/sys/class/infiniband/*' >/dev/null || fail "no RDMA device in /sys/class/infiniband: pass /dev/infiniband into the container, or accept TCP with NCCL_IB_DISABLE=1"
  fi
fi

serve=(rocm-serve serve --model "$model" --tp 8 --pp 2 --nnodes 2 --node-rank "$node_rank"
  --dist-init-addr "$rank0_addr:${PORT0:-29500}" --dist-timeout 3600 --watchdog-timeout 1200
  --chunked-prefill-size 8192 --page-size 16 --kv-cache-dtype fp8_e4m3 --max-running-requests 16
  --host 0.0.0.0 --port 9001)
exec "${serve[@]}" "$@"
