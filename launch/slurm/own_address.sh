#!/usr/bin/env bash
# Print the address of this host that other hosts reach: the source of the route to the outside, never a loopback one.
# FABRIC_PEER, an address of the other node, picks the interface when there are several.
set -euo pipefail

route=$(ip -4 -o route get "${FABRIC_PEER:-192.0.2.1}" 2>/dev/null || true)
address=$(sed -n 's/.* src \([0-9.]*\).*/\1/p' <<<"$route")
if [[ -z $address || $address == 127.* ]]; then
  echo "$(hostname): no route that leaves this host (ip route get ${FABRIC_PEER:-192.0.2.1}); set FABRIC_PEER to an address of the other node" >&2
  exit 1
fi
echo "$address"
