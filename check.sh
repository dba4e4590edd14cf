#!/usr/bin/env bash
# The gate: format, lint, types, pages and tests, all on the built wheel. On a fresh machine it makes a
# virtual environment first; a second run reuses it.
#
#   ./check.sh                the core, in .venv, but for tests that take long (marked slow)
#   ./check.sh --quick        format, lint, types, and tests that need no environment, process or
#                             kill: a minute, once the virtual environment is there
#   ./check.sh --all          with these, the core again without the extension in C, a debug build of
#                             it under sanitizers, and environment systems, in .venv-NAME for each
#                             NAME in tests/systems/environments.toml that has run = "all"
#   ./check.sh --all --once   the same, and each environment goes when its tests ran: for a machine
#                             that has no 7 GB to spare, or will not run this again
#   ./check.sh --apart NAME   one of these environments alone, by hand
#   ./check.sh --newest       the tests with the newest torch and the next TorchRL, without
#                             constraints, in .venv-newest
#   ./check.sh --browser      look at the pages of the site, and at a report's, with Debian's chromium
#                             (CHROMIUM names another); with --shots FOLDER pictures of them are left there
#   ./check.sh -k ring        any of them, and pytest gets the arguments that are left;
#                             --seconds-of-files 20 tells which test files took longest
#
# PYTHON names the interpreter to build environments with (default: python3, at least 3.11).
set -Eeuo pipefail
cd "$(dirname "$0")"
unset PYTHONDONTWRITEBYTECODE  # or each process compiles all that it imports: half of its time
python=${PYTHON:-python3}
environment=core others=() failed=() chosen=(-m "not slow") quick=() seconds=
browser= beside= group= log= said= scratch=
tools=(build setuptools hypothesis psutil pytest pytest-timeout pytest-xdist)  # of every environment

at_end() {
    if [[ $group ]]; then kill -- -"$group" 2>/dev/null || true; fi
    rm -rf "$said" "$scratch"
}
trap at_end EXIT

step() { # step NAME COMMAND...: run it, remember whether it failed, and how long it took
    local began=$SECONDS
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
    took "$1" "$began"
}

beside() { # beside NAME COMMAND...: a step while others go on; what it says comes with `join`
    beside=$1 log=$venv/beside.log
    set -m  # a group of its own, which ends with us
    (
        renice -n 5 -p "$BASHPID" >/dev/null  # it takes what the others leave
        began=$SECONDS code=0
        "${@:2}" || code=$?
        echo $((SECONDS - began)) >"$log.seconds"
        exit "$code"
    ) >"$log" 2>&1 &
    group=$!
    set +m
}

join() { # wait for what runs beside, say what it said, and remember whether it failed
    printf '\n== %s\n' "$beside"
    wait "$group" || failed+=("$beside")
    group=
    cat "$log"
    took "$beside" $((SECONDS - $(<"$log.seconds")))
}

took() { # took NAME BEGAN: say how many seconds ago a step began, here and at the end
    local line
    line=$(printf '%6d s  %s' $((SECONDS - $2)) "$1")
    seconds+=$line$'\n'
    printf '%s\n' "$line"
}

listed() { # listed EXPRESSION: its values, a line each; `every` is the list, `this` our entry
    "$python" -c "import sys, tomllib
every = tomllib.load(open('tests/systems/environments.toml', 'rb'))
this = every.get('$environment') or sys.exit('environments are: ' + ', '.join(every))
sys.stdout.writelines(f'{each}\n' for each in $1)"
}

pip_install() { # compiling all takes half of the time: what is imported is compiled then
    $bin/python -m pip install -qq --no-compile "$@"
}

set_up() { # the environment, made anew when what it is made from has changed
    local stamp=$venv/made-from wanted extras pins=(-c constraints.txt)
    wanted=$(cat pyproject.toml constraints.txt tests/systems/environments.toml | sha256sum)
    extras=$(listed "[this['extras']]")
    if [[ $environment == newest ]]; then
        pins=(--upgrade) wanted+=" $(date +%F)"  # what is the newest today, setuptools of a venv too
        if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then rm -rf "$venv"; fi
    fi
    if [[ ! -x $bin/python ]]; then "$python" -m venv "$venv"; fi
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        pip_install "${pins[@]}" "${tools[@]}"
        build_wheel
        listed "this.get('packages', ())" >"$venv/packages"
        listed "this.get('without-dependencies', ())" >"$venv/without-dependencies"
        pip_install "${pins[@]}" "$(echo "$venv"/dist/*.whl)[$extras]" -r "$venv/packages"
        listed "this.get('instead-of', ())" >"$venv/instead-of"
        if [[ -s $venv/instead-of ]]; then
            $bin/python -m pip uninstall -qq --yes -r "$venv/instead-of"
        fi
        pip_install "${pins[@]}" --no-deps -r "$venv/without-dependencies"
        echo "$wanted" >"$stamp"
    else
        build_wheel
    fi
    pip_install --no-deps --force-reinstall "$venv"/dist/*.whl
}

build_wheel() { # by way of the sdist, so that what the sdist lacks is missed here
    rm -rf "$venv/dist"
    if ! $bin/python -m build --no-isolation --outdir "$venv/dist" . >"$venv/build.log" 2>&1; then
        cat "$venv/build.log"
        return 1
    fi
}

case ${1-} in
--quick)
    quick=(
        tests/collector/cli/test_usage.py tests/collector/counting
        tests/project/test_dependencies.py tests/project/test_language.py
        tests/project/test_structure.py tests/project/test_system_tests.py
        tests/storage/engine/test_ring.py tests/storage/engine/test_schema_index_header.py
        tests/storage/readers tests/storage/trajectories/test_row_index.py
    )
    shift
    ;;
--all)
    words=$(listed "(name for name, each in every.items() if each['run'] == 'all')")
    mapfile -t others <<<"$words"
    chosen=()
    shift
    if [[ ${1-} == --once ]]; then export TALLYROLL_CHECK_ONCE=1 && shift; fi
    ;;
--apart)
    environment=${2?"--apart NAME"} chosen=()
    shift 2
    ;;
--newest)
    environment=newest
    shift
    ;;
--browser)
    browser=1
    shift
    "$python" docs/browser.py || exit 1
    ;;
esac
venv=.venv-$environment tests=(tests/systems)
case $environment in
core) venv=.venv tests=("${quick[@]}") ;;
newest) tests=() ;;
esac
bin=$venv/bin

trap 'printf "\nFAILED: set-up (see above)\n"' ERR
printf '== set-up\n'
began=$SECONDS
set_up
trap - ERR
took set-up "$began"

pages() {
    $bin/python -m sphinx -n -W -q -E --keep-going -b html docs "$venv/pages" &&
        $bin/python docs/site_check.py "$venv/pages"
}
types_and_pages() {
    local code=0
    $bin/mypy || code=1
    pages || code=1
    return "$code"
}
compile_tests() { # or each process of the tests does, for half a minute; what is wrong they say
    $bin/pytest --collect-only -qq -m "not slow" "${tests[@]}" >/dev/null 2>&1 || true
}
look_at_pages() { # in an environment of its own: playwright alone, which drives the browser
    if [[ ! -x .venv-browser/bin/python ]]; then "$python" -m venv .venv-browser; fi
    .venv-browser/bin/python -m pip install -qq -c constraints.txt playwright || return
    $bin/python docs/report_page.py "$venv/report.html" || return
    .venv-browser/bin/python docs/browser.py "$venv/pages" --page "$venv/report.html" "$@"
}
if [[ $browser ]]; then
    step "pages" pages
    step "browser" look_at_pages "$@"
elif [[ $environment == core ]]; then
    beside "types and pages" types_and_pages
    step "ruff format" $bin/ruff format --check .
    step "ruff check" $bin/ruff check .
    step "imports" $bin/lint-imports --no-cache
    compile_tests
fi
# Many tests wait for other processes: three at a time, on two processors. More would only take each
# other's time.
several=(--numprocesses 3 --dist worksteal)
export TALLYROLL_TEST_ENVIRONMENT=$environment
run_tests() { # what fails is printed again at the end: much is printed meanwhile
    # Where the machine fails, all tests do: the reasons of the first of them are enough.
    $bin/pytest "${several[@]}" --maxfail 50 "${chosen[@]}" "${tests[@]}" "$@" | tee "$said" && return
    reasons+=$(grep -E '^(E  |FAILED|ERROR|_____|[^ ]+\.py:[0-9]+: )' "$said" | tail -n 60)$'\n'
    return 1
}
without_extension() { # as where there is no C compiler: the tests of what it does
    local its=(
        tests/collector/{batches,collectors,envs,rollout} tests/storage/{engine,replay}
        # Of workers what they make: how they start and die, and what they share, is Python's alone.
        tests/collector/workers/test_{few_slots_of_workers,weights_in_a_lease}.py
        tests/collector/workers/test_multiprocess_{async,episodes,state,sync}.py
        # Of faults those that meet rows as they are written: the others are of files and processes.
        tests/storage/faults/test_{copies,failing_calls,kill*,power_cuts,system_errors}.py
        tests/storage/faults/rewinds/test_kill*.py
        tests/storage/formats/test_memmap_storage.py tests/project/test_golden.py
    )
    TALLYROLL_PLAN=-kernel $bin/pytest "${several[@]}" -m "not slow" "${its[@]}" "$@"
}
sanitizers() { # the libraries that a debug build needs, one after the other; fails without one
    local name path found=()
    for name in asan ubsan stdc++; do
        path=$(gcc -print-file-name="lib$name.so" 2>/dev/null) && [[ -e $path ]] || return
        found+=("$path")
    done
    echo "${found[*]}"
}
under_sanitizers() { # a debug build of the extensions: a fault ends a process, or leaves a report
    local tree=$PWD/$venv/debug reports=$PWD/$venv/reports preload code=0
    local options=detect_leaks=0:handle_segv=0:allocator_may_return_null=1:abort_on_error=1
    local its=(
        tests/storage/engine/test_{compiled_copies,counts,debug_build,ring,storage_machine}.py
        tests/storage/engine/test_schema_index_header.py
        tests/storage/faults/test_fuzzed_storages.py
        tests/storage/sampling/test_{sum_tree,update_at_once}.py
        tests/storage/trajectories/test_lane_blocks.py
        tests/collector/batches/test_kernel.py
        tests/collector/collectors/test_random_configurations.py
    )
    if ! preload=$(sanitizers); then
        echo "skipped: gcc with libasan and libubsan is not there"
        return
    fi
    rm -rf "$tree" "$reports"
    mkdir "$reports"
    TALLYROLL_DEBUG=1 CC=gcc pip_install --no-deps --no-build-isolation --target "$tree" \
        "$venv"/dist/*.tar.gz || return
    # Standard error is not captured: a check that fails in C writes its line there.
    LD_PRELOAD=$preload PYTHONPATH=$tree PYTHONMALLOC=malloc TALLYROLL_CONFIGURATIONS=50 \
        TALLYROLL_FUZZED=40 \
        ASAN_OPTIONS=$options:log_path=$reports/asan \
        UBSAN_OPTIONS=print_stacktrace=1:log_path=$reports/ubsan \
        $bin/python -m pytest --numprocesses 2 --dist worksteal --capture=sys "${its[@]}" "$@" || code=1
    if compgen -G "$reports/*" >/dev/null; then
        head -n 60 "$reports"/*
        code=1
    fi
    return "$code"
}
# Tests write and sync many small files, a third of their time on a disk: in memory where it has room.
memory=/dev/shm
room=$(df --output=avail --block-size=1G "$memory" 2>/dev/null | tail -n 1)
if ((${room:-0} >= 6)); then
    scratch=$(mktemp -d -p "$memory" tallyroll-check.XXXXXX)
    export TMPDIR=$scratch
fi
said=$(mktemp) reasons=
if [[ ! $browser ]]; then step "pytest" run_tests "$@"; fi
if [[ $group ]]; then join; fi
if [[ $environment == core && ${#chosen[@]} == 0 ]]; then
    step "pytest without the extension" without_extension "$@"
    step "pytest under sanitizers" under_sanitizers "$@"
fi

if [[ ${TALLYROLL_CHECK_ONCE-} ]]; then rm -rf "$venv"; fi

export TALLYROLL_RAY=short  # whose actors import torch for minutes: all of them by --apart ray
for other in "${others[@]}"; do
    step "environment $other" ./check.sh --apart "$other" "$@"
done

printf '\n== seconds\n%s%6d s  in all\n' "$seconds" "$SECONDS"
if ((${#failed[@]})); then
    printf '\nFAILED: %s\n%s' "$(IFS=,; echo "${failed[*]}")" "$reasons"
    printf '%s processors, %s open files each\n' "$(nproc)" "$(ulimit -n)"
    df -h . "${TMPDIR:-/tmp}" /dev/shm
    free -h
    exit 1
fi
printf '\nAll checks passed.\n'
