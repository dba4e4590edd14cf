#!/usr/bin/env bash
# The whole gate: format, lint, types and tests, all on the built wheel. On a fresh machine it
# makes a virtual environment in .venv first; a second run reuses it.
#
#   ./check.sh            everything
#   ./check.sh -k ring    the same, and pytest gets these arguments
#
# PYTHON names the interpreter to build the environment with (default: python3, at least 3.11).
set -Eeuo pipefail
cd "$(dirname "$0")"
bin=.venv/bin
failed=()

step() { # step NAME COMMAND...: run it, remember whether it failed
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
}

set_up() { # the environment, made anew when what it is made from has changed
    local stamp=.venv/made-from wanted
    wanted=$(cat pyproject.toml constraints.txt | sha256sum)
    if [[ ! -x $bin/python ]]; then "${PYTHON:-python3}" -m venv .venv; fi
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        $bin/python -m pip install -q -c constraints.txt build setuptools
        build_wheel
        $bin/python -m pip install -q -c constraints.txt "$(echo .venv/dist/*.whl)[test]"
        echo "$wanted" >"$stamp"
    else
        build_wheel
    fi
    $bin/python -m pip install -q --no-deps --force-reinstall .venv/dist/*.whl
}

build_wheel() { # by way of the sdist, so that what the sdist lacks is missed here
    rm -rf .venv/dist
    if ! $bin/python -m build --no-isolation --outdir .venv/dist . >.venv/build.log 2>&1; then
        cat .venv/build.log
        return 1
    fi
}

trap 'printf "\nFAILED: set-up (see above)\n"' ERR
printf '== set-up\n'
set_up
trap - ERR

step "ruff format" $bin/ruff format --check .
step "ruff check" $bin/ruff check .
step "mypy" $bin/mypy
step "imports" $bin/lint-imports --no-cache
# Many tests wait for other processes: two at a time. More would only take each other's time.
step "pytest" $bin/pytest --numprocesses 2 --dist worksteal "$@"

if ((${#failed[@]})); then
    printf '\nFAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
printf '\nAll checks passed.\n'
