#!/usr/bin/env bash
# What tests/two_hosts needs of the machine: iproute2, which this installs where it is missing, and the right to make
# network namespaces, which this tries. Ends with 2 and one sentence when either cannot be had.
set -euo pipefail

fail() {
  echo "test-two-hosts: $*" >&2
  exit 2
}

as_root=()
if [[ $(id -u) != 0 ]]; then
  command -v sudo >/dev/null && sudo -n true 2>/dev/null && as_root=(sudo -n)
fi

if ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
  [[ $(id -u) == 0 || ${#as_root[@]} -gt 0 ]] || fail "iproute2 is missing and only root can install it: apt-get install iproute2"
  command -v apt-get >/dev/null || fail "iproute2 is missing and there is no apt-get here: install the programs ip and tc"
  echo "test-two-hosts: installing iproute2"
  "${as_root[@]}" apt-get update -qq || fail "apt-get update failed: iproute2 cannot be installed"
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends iproute2 >/dev/null ||
    fail "apt-get install iproute2 failed"
fi

name=rs$$n0a
said=$(ip netns add "$name" 2>&1) ||
  fail "network namespaces cannot be made here (${said##*$'\n'}): it takes root (in a container: --privileged)"
ip netns delete "$name"
