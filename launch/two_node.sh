#!/usr/bin/env bash
# One server over two nodes; the same command on both, NODE_RANK differs:
#
#     launch/two_node.sh RANK0_ADDR NODE_RANK MODEL [flags of rocm-serve serve]
#
# RANK0_ADDR is an address of node 0 that node 1 reaches. The interface is found from the route between the nodes, and
# told to gloo, RCCL and MORI. FABRIC=cx7|thor2|ainic|none picks the preset of launch/fabric for the network cards; left
# out, the cards' maker does. A variable that is set already is kept. The preflight then says what is missing here, and
# tells the other node; PREFLIGHT=off leaves it out. The production settings are at the end of this
# file; flags given here, variables ROCM_SERVE_<FLAG> that are set already and keys of a --config file win.
# PORT0 (29500) is the first of the four ports that the nodes use among themselves. HOST_ROOT (/) is where dev, proc and
# sys are.
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
[[ $rank0_addr == *:* && $rank0_addr != \[* ]] && rank0_addr="[$rank0_addr]"
where=(--nnodes 2 --node-rank "$node_rank" --dist-init-addr "$rank0_addr:${PORT0:-29500}")

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${HOST_ROOT:-/}
if [[ -z ${FABRIC:-} && -d $root/sys/class/infiniband ]]; then
  FABRIC=$(rocm-serve preflight --which-preset --root "$root")
fi
export FABRIC=${FABRIC:-}
if [[ -n $FABRIC && $FABRIC != none ]]; then
  preset=$here/fabric/$FABRIC.env
  [[ -r $preset ]] || fail "FABRIC=$FABRIC: legal: $(cd "$here/fabric" && echo *.env | sed 's/\.env//g') none"
  while IFS='=' read -r name value; do
    [[ $name =~ ^[A-Z][A-Z0-9_]*$ ]] || continue
    if [[ -n ${!name+set} ]]; then
      echo "two_node.sh: $name=${!name} is kept; preset $FABRIC has $value"
    else
      export "$name=$value"
      echo "two_node.sh: $name=$value, of preset $FABRIC"
    fi
  done <"$preset"
fi

[[ ${PREFLIGHT:-} == off ]] || rocm-serve preflight "${where[@]}" --root "$root"

# As variables and not as flags, so that a flag given here wins in whatever spelling it comes (--tp 4, --tp-size 4).
production=(TP=8 PP=2 DIST_TIMEOUT=3600 WATCHDOG_TIMEOUT=1200 CHUNKED_PREFILL_SIZE=8192 PAGE_SIZE=16
  KV_CACHE_DTYPE=fp8_e4m3 MAX_RUNNING_REQUESTS=16 MEM_FRACTION=0.95 REASONING_PARSER=qwen3 TOOL_CALL_PARSER=qwen3_coder
  HOST=0.0.0.0 PORT=9001)
config='' previous=''
for word in "$@"; do
  [[ $previous == --config ]] && config=$word
  [[ $word == --config=* ]] && config=${word#--config=}
  previous=$word
done
in_config() { # NAME: has the file of --config that key, with - or _ between its words?
  local key=${1,,}
  [[ -r $config ]] && grep -qE "^[[:space:]]*[\"']?${key//_/[-_]}[\"']?[[:space:]]*=" "$config"
}
for setting in "${production[@]}"; do
  name=ROCM_SERVE_${setting%%=*}
  [[ -n ${!name+set} ]] || in_config "${setting%%=*}" || export "$name=${setting#*=}"
done
exec rocm-serve serve --model "$model" "${where[@]}" "$@"
