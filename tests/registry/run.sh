#!/usr/bin/env bash
# Pushes bundles to registry processes on loopback and pulls them again: host/querl-bundle/tests/oci/registry.rs.
#
# Usage: tests/registry/run.sh
#
# Needs docker-registry (Debian and Ubuntu: apt-get install docker-registry) or a program `registry` of the same project.
# If `wkg` is on PATH (cargo install wkg --locked), it also pulls the pushed bundle, and the component is compared byte for byte.
# Installs nothing. All files are written to a temporary folder; both registries end with the script.
set -euo pipefail
cd "$(dirname "$0")/../.."

registry=$(command -v docker-registry || command -v registry || true)
if [[ -z $registry ]]; then
  echo "run.sh: neither docker-registry nor registry is on PATH; install one, for example with: apt-get install docker-registry" >&2
  exit 2
fi

folder=$(mktemp -d)
pids=()
finish() {
  kill "${pids[@]}" 2>/dev/null || true
  rm -rf "$folder"
}
trap finish EXIT

# Starts a registry of the given name; further arguments are lines of its configuration. Sets `address`.
start() {
  local name=$1 log="$folder/$1.log"
  shift
  printf '%s\n' 'version: 0.1' "storage: {filesystem: {rootdirectory: $folder/$name}}" 'http: {addr: "127.0.0.1:0"}' "$@" \
    >"$folder/$name.yml"
  "$registry" serve "$folder/$name.yml" >"$log" 2>&1 &
  pids+=($!)
  for _ in $(seq 100); do
    address=$(sed -n 's/.*listening on \(127\.0\.0\.1:[0-9]*\).*/\1/p' "$log" | head -n 1)
    [[ -n $address ]] && return
    sleep 0.1
  done
  echo "run.sh: $registry did not start:" >&2
  cat "$log" >&2
  exit 1
}

# User `tester`, password `geheim`, used only by this test.
echo 'tester:$2b$05$d7lmq10kLlXeQtcj67g2b.amlGMFoQvBAywj1pp2KcKW.3rfl7eWO' >"$folder/htpasswd"
start open
export QUERL_TEST_REGISTRY=$address
start locked "auth: {htpasswd: {realm: querl, path: $folder/htpasswd}}"
export QUERL_TEST_REGISTRY_LOCKED=$address
# The file that `docker login` would write.
mkdir "$folder/docker"
echo "{\"auths\":{\"$address\":{\"auth\":\"$(printf 'tester:geheim' | base64)\"}}}" >"$folder/docker/config.json"
export DOCKER_CONFIG=$folder/docker
export QUERL_TEST_FOLDER=$folder
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
unset QUERL_REGISTRY_HOST QUERL_REGISTRY_USER QUERL_REGISTRY_PASSWORD

cargo test --release --locked -p querl-bundle --test oci registry:: -- --ignored

if ! command -v wkg >/dev/null; then
  echo "run.sh: wkg is not on PATH, so that pulling with it was not tested; install it with: cargo install wkg --locked"
  exit 0
fi
wkg oci pull --insecure "$QUERL_TEST_REGISTRY" "$QUERL_TEST_REGISTRY/querl/for-wkg/reward-brevity:0.1.0" --output "$folder/pulled.wasm"
cmp "$folder/pulled.wasm" "$folder/for-wkg.wasm"
echo "run.sh: wkg pulled the component byte for byte"
