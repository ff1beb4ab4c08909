#!/bin/sh
# Checks that every folder made by `querl plugin new` works unchanged. For each kind and language: makes it, runs its tests, builds it, runs
# the conformance suite, and checks that an unchanged folder is not built again. Prints a table. If a step fails, the exit code is not 0, and
# the output of the failed step is kept in the scratch folder, whose path is printed.
#
#     tests/plugins/new.sh                        all 12; about 15 minutes on 2 cores, most of it compiling components
#     tests/plugins/new.sh python                 one language
#     tests/plugins/new.sh python reward          one of them
#
# Needs the program (`cargo build --release`, or QUERL=path of another), the tool chains of plugins/setup.sh, and for Rust the target
# wasm32-wasip2 with the crates of plugins/Cargo.lock downloaded. REPEATS (100) is the number of times that the suite repeats a call.
set -u
repository=$(cd "$(dirname "$0")/../.." && pwd)
querl=${QUERL:-$repository/target/release/querl}
repeats=${REPEATS:-100}
languages=${1:-rust python javascript}
kinds=${2:-reward filter prompt style-scorer}

scratch=$(mktemp -d)
# The builders look for tools in parent folders, so that the folders below find them here.
ln -s "$repository/plugins/.venv" "$scratch/.venv"
ln -s "$repository/plugins/node_modules" "$scratch/node_modules"
# Plugins in Rust share compiled dependencies.
export CARGO_TARGET_DIR="$scratch/native"

own_tests() {
    case $1 in
        rust) cargo test --quiet --release ;;
        python) python3 -m unittest ;;
        javascript) npm test ;;
    esac
}

failed=0
# Runs a step: its name, then the command. Prints its seconds, or `failed`.
step() {
    name=$1
    shift
    begun=$(date +%s)
    if (cd "$folder" && "$@") >"$scratch/$plugin.$name.log" 2>&1; then
        printf ' %10s' "$(($(date +%s) - begun)) s"
    else
        failed=$((failed + 1))
        printf ' %10s' failed
        echo "$scratch/$plugin.$name.log" >>"$scratch/failed"
    fi
}

is_fresh() {
    "$querl" plugin build . | grep -q 'up to date'
}

printf '%-26s %10s %10s %10s %10s %10s\n' plugin new tests build suite again
for language in $languages; do
    for kind in $kinds; do
        plugin="$language-$kind"
        folder=$scratch/$plugin
        printf '%-26s' "$plugin"
        mkdir "$folder"
        step new "$querl" plugin new "$plugin" --kind "$kind" --lang "$language" --dir "$scratch"
        step tests own_tests "$language"
        step build "$querl" plugin build .
        step suite "$querl" plugin test . --repeats "$repeats"
        step again is_fresh
        echo
    done
done

if [ "$failed" -gt 0 ]; then
    echo "$failed steps failed:"
    cat "$scratch/failed"
    exit 1
fi
rm -rf "$scratch"
