#!/usr/bin/env bash
# Runs a deployment folder with Docker and with systemd, using the commands of its README.
#
#   cargo build --release && tests/deploy/run.sh RUN_DIR
#
# Needs docker with compose 2, curl, openssl, python3, the ports 8000, 9090 and 3000, and the right to run a privileged container in which
# systemd boots. Images are pulled; if that fails, local images of the same names are used, and without an image of Grafana its part is skipped.
# Exit code 0 if all checks pass. Its containers, volumes, images and files are removed at the end; pulled images and the build cache are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
querl=$(realpath "${QUERL:-target/release/querl}")
run=$(realpath "${1:?the folder of a finished run}")
work=$(mktemp -d)
export COMPOSE_PROJECT_NAME=querl-deploy-test
booted=querl-deploy-test-systemd
in=() # Prefix of commands that run next to the service: empty, or `docker exec` in the container with systemd.

log() { printf '== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
finish() {
    local status=$?
    set +e
    if ((status)); then
        docker compose logs --no-color --tail 20
        docker exec "$booted" journalctl --no-pager --lines 20 --unit querl-rewrite
    fi
    {
        docker rm --force --volumes "$booted"
        docker compose down --volumes --rmi local --timeout 1
        docker rmi --force "$booted"
    } >/dev/null 2>&1
    rm -rf "$work"
} >&2
trap finish EXIT

# Prints the n-th code block of the README.
block() { awk -v n="$1" '/^```/ { on = /sh$/ && ++i == n; next } on' README.md; }
get() { "${in[@]}" curl --silent --show-error --fail --max-time 300 "$@"; }
rewrite() { get http://127.0.0.1:8000/v1/rewrite -H "Authorization: Bearer $key" -H 'Content-Type: application/json' -d "$1"; }
# Repeats a command until it succeeds, for at most a minute.
until_true() {
    for _ in $(seq 120); do "$@" >/dev/null 2>&1 && return; sleep 0.5; done
    fail "still not after 60 s: $*"
}
is_ready() { get http://127.0.0.1:8000/ready; }
is_running() { get http://127.0.0.1:8000/metrics | grep -q '^querl_rewrite_running_requests [1-9]'; }
answers() {
    local answer
    answer=$(rewrite '{"query": "胶原蛋白怎么吃"}') && echo "$answer"
    [[ $answer == *'"fallback":null'* ]] || fail "no rewrite"
}
# A request for 250 rewrites gets a complete response although the service is stopped meanwhile.
stops_gracefully() {
    local request
    for try in 1 2 3 4 5; do
        rewrite "$(python3 -c "import json; print(json.dumps({'queries': [{'query': f'胶原蛋白 $try {i}'} for i in range(250)]}))")" >"$work/response" &
        request=$!
        while kill -0 $request 2>/dev/null; do
            is_running || continue
            "$@"
            wait $request || fail "the request in progress was not answered"
            python3 -c 'import json, sys; n = len(json.load(open(sys.argv[1]))["results"]); assert n == 250, n' "$work/response"
            return
        done
    done
    fail "the requests ended before the service could be stopped"
}

log "querl deploy"
"$querl" deploy "$run" --out "$work/deployment"
cd "$work/deployment"
services=()
docker pull --quiet debian:trixie-slim || true
for service in prometheus grafana; do
    image=$(sed -n "s/^ *image: \(.*$service:.*\)/\1/p" compose.yaml)
    docker pull --quiet "$image" || true
    if docker image inspect "$image" >/dev/null; then services+=("$service"); fi
done
[[ " ${services[*]} " == *" grafana "* ]] || log "SKIPPED: there is no image of Grafana"

log "Docker"
block 1 | sed "s/--wait$/--wait querl ${services[*]}/" | bash -euo pipefail
echo
key=$(sed -n 's/^QUERL_API_KEY=//p' keys.env)
answers
inside() { docker compose exec -T querl bash -c "$1"; }
container() { docker inspect --format "{{$1}}" "$(docker compose ps --all --quiet querl)"; }
[[ $(container .State.Health.Status) == healthy ]] || fail "not healthy"
[[ $(container .HostConfig.Memory) == $(($(sed -n 's/.*mem_limit: \(.*\)m/\1/p' compose.yaml) << 20)) ]] || fail "no memory limit"
[[ $(inside 'id -u') == 10001 ]] || fail "another user"
inside 'touch /var/cache/querl/x /tmp/x && rm /var/cache/querl/x' || fail "the cache cannot be written"
! docker compose exec -T --user 0 querl touch /opt/querl/x 2>/dev/null || fail "the root is not read-only"
! inside 'ls -A /opt/querl' | grep keys || fail "the image has the keys"

log "Prometheus${services[1]:+ and Grafana}"
prometheus=http://127.0.0.1:9090
if [[ " ${services[*]} " == *" grafana "* ]]; then
    until_true get http://127.0.0.1:3000/api/dashboards/uid/querl-rewrite
    prometheus=http://127.0.0.1:3000/api/datasources/proxy/uid/querl-prometheus
fi
is_up() { get "$prometheus/api/v1/query?query=up" | grep -q ',"1"\]'; }
until_true is_up
# Waits for two scrapes after the requests.
sleep 12
python3 - "$prometheus" <<'CHECK'
import json, re, sys, urllib.parse, urllib.request
def query(text):
    url = f"{sys.argv[1]}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    return json.load(urllib.request.urlopen(url))["data"]["result"]
targets = [target for panel in json.load(open("grafana/querl.json"))["panels"] for target in panel["targets"]]
n_with_data, without_data = 0, set()
for expression in (target["expr"].replace("$__rate_interval", "1m").replace("$tenant", ".*") for target in targets):
    if query(expression):
        n_with_data += 1
        continue
    # Some metrics exist after their first event only.
    missing = {name for name in re.findall(r"querl_\w+", expression) if not query(name)}
    assert missing, f"no data: {expression}"
    without_data |= missing
print(f"expressions of the dashboard {len(targets)}, with data {n_with_data}; no series yet of {', '.join(sorted(without_data))}")
assert n_with_data >= 15
CHECK

log "Docker: restart after SIGKILL, stop"
inside 'kill -9 -1' || true
is_restarted() { [[ $(container .RestartCount) == 1 && $(container .State.Health.Status) == healthy ]]; }
until_true is_restarted
answers
stops_gracefully docker compose stop querl
[[ $(container .State.ExitCode) == 0 ]] || fail "exit code $(container .State.ExitCode)"
docker compose down --volumes --timeout 1

log "systemd"
# Without the commands that would change settings of this machine.
docker build --quiet --network host --tag "$booted" - <<'IMAGE'
FROM debian:trixie-slim
RUN apt-get update && apt-get install --yes --no-install-recommends systemd sudo curl openssl
RUN systemctl mask systemd-sysctl systemd-modules-load systemd-tmpfiles-setup-dev-early systemd-tmpfiles-setup-dev
IMAGE
docker run --detach --name "$booted" --hostname localhost --network none --privileged --cgroupns private --tmpfs /run --tmpfs /tmp "$booted" /lib/systemd/systemd
in=(docker exec "$booted")
docker cp "$work/deployment" "$booted:/root/deployment"
is_booted() { [[ $("${in[@]}" systemctl is-system-running) =~ running|degraded ]]; }
until_true is_booted
block 2 | docker exec --interactive --workdir /root/deployment "$booted" bash -euo pipefail
key=$("${in[@]}" sed -n 's/^QUERL_API_KEY=//p' /etc/querl/keys.env)
unit() { "${in[@]}" systemctl show --value --property "$1" querl-rewrite; }
until_true is_ready
answers
user=$("${in[@]}" stat -c %u "/proc/$(unit MainPID)")
log "user $user, memory limit $(unit MemoryMax), tasks $(unit TasksCurrent) of $(unit TasksMax)"
((user >= 61184)) || fail "not a dynamic user"
"${in[@]}" bash -c '[[ $(stat -c %a /var/cache/private/querl) == 700 && $(ls /var/cache/private/querl) ]]' || fail "no cache"
faults=$("${in[@]}" systemd-analyze verify /opt/querl/querl-rewrite.service 2>&1) && [[ -z $faults ]] || fail "systemd-analyze verify: $faults"
"${in[@]}" systemd-analyze security --no-pager --threshold=20 querl-rewrite | tail -n 1
"${in[@]}" systemctl reload querl-rewrite
is_reloaded() { "${in[@]}" journalctl --output cat --unit querl-rewrite | grep 'loaded again: nothing has changed'; }
until_true is_reloaded
answers

log "systemd: the next deployment"
block 3 | docker exec --interactive --workdir /root/deployment "$booted" bash -euo pipefail
until_true is_ready
answers

log "systemd: restart after SIGKILL, stop, no restart after a wrong configuration"
"${in[@]}" systemctl kill --signal KILL querl-rewrite
is_restarted() { [[ $(unit NRestarts) == 1 ]] && is_ready; }
until_true is_restarted
answers
stops_gracefully "${in[@]}" systemctl stop querl-rewrite
[[ $(unit Result) == success && $(unit ExecMainStatus) == 0 ]] || fail "$(unit Result), exit code $(unit ExecMainStatus)"
"${in[@]}" mv /opt/querl/base /opt/querl/away
"${in[@]}" systemctl start querl-rewrite
is_given_up() { [[ $(unit ActiveState) == failed ]]; }
until_true is_given_up
[[ $(unit ExecMainStatus) == 2 && $(unit NRestarts) == 0 ]] || fail "restarted after exit code $(unit ExecMainStatus)"
log "all as it should be"
