#!/usr/bin/env bash
# nvcc for candle's kernels, without those for weights in GGUF's quantised formats and for mixtures of experts, which querl never
# calls: they take longer to compile than all the rest. Where one of them is called all the same, the program ends with a
# sentence. Everything else is left to nvcc.
set -euo pipefail
nvcc="$(cd "$(dirname "$0")" && pwd)/nvcc"

after() { # the argument that follows OPTION
    local option="$1"; shift
    while [ $# -gt 1 ]; do
        if [ "$1" = "$option" ]; then echo "$2"; return; fi
        shift
    done
}

case " $* " in
*" --ptx "*quantized.cu" ")
    empty=$(mktemp -d)
    trap 'rm -rf "$empty"' EXIT
    : > "$empty/quantized.cu"
    "$nvcc" "${@:1:$#-1}" "$empty/quantized.cu"
    ;;
*" -c "*src/moe/*.cu" " | *" -c "*src/mmq_gguf/*.cu" " | *" -c "*src/mmvq_gguf.cu" ")
    echo | gcc -x c -c - -o "$(after -o "$@")"
    ;;
*" --lib "*)
    # The functions are named in candle's declarations of them.
    if [ "$(basename "$(after -o "$@")")" != libmoe.a ] || [ ! -e src/ffi.rs ]; then exec "$nvcc" "$@"; fi
    out=$(after -o "$@")
    {
        echo '#include <stdio.h>'
        echo '#include <stdlib.h>'
        sed -nE 's/^ *pub fn (\w+)\(.*/void \1(void) { fputs("`\1` was left out of this build of candle\\n", stderr); abort(); }/p' src/ffi.rs
    } | gcc -fPIC -x c -c - -o "$out.o"
    rm -f "$out"
    ar rcs "$out" "$out.o"
    ;;
*) exec "$nvcc" "$@" ;;
esac
