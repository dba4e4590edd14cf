#!/usr/bin/env bash
# The gate: check format, lint, types, docs pages and tests, all against the built wheel. The first run
# on a machine creates a virtual environment; later runs reuse it.
#
#   ./check.sh                check the core, in .venv, without the long tests (marked slow)
#   ./check.sh --quick        check format, lint and types, and run the tests that need no environment,
#                             process or kill: a minute, once the virtual environment exists
#   ./check.sh --all          run the long tests too, then the core again without the C extension, a
#                             debug build under sanitizers, and the environment systems, in .venv-NAME
#                             for each NAME in tests/systems/environments.toml that has run = "all"
#   ./check.sh --all --once   the same, but delete each virtual environment after its tests: for a machine
#                             that cannot spare 7 GB, or will not run this again
#   ./check.sh --apart NAME   run only this one of the environments
#                             With TALLYROLL_CHECK_UNTIL=SECONDS (since 1970), no long test and no
#                             environment begins after that time; each one is reported.
#   ./check.sh --newest       run the tests with the newest torch and the next TorchRL, without
#                             constraints, in .venv-newest
#   ./check.sh --browser      check the pages of the site, of a report and of the viewer, in Debian's chromium
#                             (CHROMIUM names another browser), the last two with axe-core too, if npm is there;
#                             --shots FOLDER saves screenshots there
#   ./check.sh -k ring        any of these: pass the remaining arguments to pytest;
#                             --seconds-of-files 20 lists the slowest test files
#
# PYTHON names the interpreter that creates the virtual environments (default: python3, at least 3.11).
set -Eeuo pipefail
cd "$(dirname "$0")"
unset PYTHONDONTWRITEBYTECODE  # or every process recompiles its imports, half of its time
python=${PYTHON:-python3}
environment=core others=() failed=() chosen=(-m "not slow") quick=() seconds=
browser= beside= group= log= said= scratch= built=
tools=(build setuptools hypothesis psutil pytest pytest-timeout pytest-xdist)  # for every environment

at_end() {
    if [[ $group ]]; then kill -- -"$group" 2>/dev/null || true; fi
    rm -rf "$said" "$scratch" "$built"
}
trap at_end EXIT

step() { # step NAME COMMAND...: run a step, record a failure, and report the time it took
    local began=$SECONDS
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
    took "$1" "$began"
}

beside() { # beside NAME COMMAND...: run a step in the background; `join` prints its output
    beside=$1 log=$venv/beside.log
    set -m  # start a new process group, which at_end kills
    (
        renice -n 5 -p "$BASHPID" >/dev/null  # give priority to the steps in the foreground
        began=$SECONDS code=0
        "${@:2}" || code=$?
        echo $((SECONDS - began)) >"$log.seconds"
        exit "$code"
    ) >"$log" 2>&1 &
    group=$!
    set +m
}

join() { # wait for the background step, print its output, and record a failure
    printf '\n== %s\n' "$beside"
    wait "$group" || failed+=("$beside")
    group=
    cat "$log"
    took "$beside" $((SECONDS - $(<"$log.seconds")))
}

took() { # took NAME BEGAN: print a step's duration now, and again in the summary
    local line
    line=$(printf '%6d s  %s' $((SECONDS - $2)) "$1")
    seconds+=$line$'\n'
    printf '%s\n' "$line"
}

listed() { # listed EXPRESSION: print its values, one per line; `every` is the table, `this` our entry
    "$python" -c "import sys, tomllib
every = tomllib.load(open('tests/systems/environments.toml', 'rb'))
this = every.get('$environment') or sys.exit('environments are: ' + ', '.join(every))
sys.stdout.writelines(f'{each}\n' for each in $1)"
}

pip_install() { # skip compiling, which takes half of the time: imports compile what they need
    $bin/python -m pip install -qq --no-compile "$@"
}

set_up() { # create the environment, or update it if the files that define it have changed
    local stamp=$venv/made-from wanted extras pins=(-c constraints.txt)
    wanted=$(cat pyproject.toml constraints.txt tests/systems/environments.toml | sha256sum)
    extras=$(listed "[this['extras']]")
    if [[ $environment == newest ]]; then
        pins=(--upgrade) wanted+=" $(date +%F)"  # the newest of today, even of a venv's setuptools
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

build_wheel() { # build from the sdist, so that a file missing there causes a failure here
    rm -rf "$venv/dist"
    if [[ ${TALLYROLL_CHECK_BUILT-} ]]; then
        cp -r "$TALLYROLL_CHECK_BUILT" "$venv/dist"
        return
    fi
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
if [[ $environment =~ ^(core|newest)$ && ! $browser && ! ${quick[*]} ]]; then
    $bin/python tests/support/fake_gpu_kit.py || true  # now, or several tests wait for the compiler
fi
took set-up "$began"

pages() {
    $bin/python -m sphinx -n -W -q -E --keep-going -b html docs "$venv/pages" &&
        $bin/python docs/site_check.py "$venv/pages"
}
compile_tests() { # or each test process does, for half a minute; pytest reports errors later
    $bin/pytest --collect-only -qq -m "not slow" "${tests[@]}" >/dev/null 2>&1 || true
}
look_at_pages() { # use a separate environment with only playwright, which drives the browser
    if [[ ! -x .venv-browser/bin/python ]]; then "$python" -m venv .venv-browser; fi
    .venv-browser/bin/python -m pip install -qq -c constraints.txt playwright || return
    $bin/python docs/report_page.py "$venv/report.html" || return
    local axe=.venv-browser/package/axe.min.js look=(.venv-browser/bin/python docs/browser.py "$@")
    if [[ ! -f $axe ]] && command -v npm >/dev/null; then
        (cd .venv-browser && npm pack --silent axe-core@4.14.1 | xargs tar xzf) || return
    fi
    if [[ -f $axe ]]; then look+=(--axe "$axe"); else echo "axe: skipped, npm is not installed"; fi
    "${look[@]}" "$venv/pages" --page "$venv/report.html" || return
    $bin/python docs/viewed.py "${look[@]}" --viewer
}
if [[ $browser ]]; then
    step "pages" pages
    step "browser" look_at_pages "$@"
elif [[ $environment == core ]]; then
    beside "types" $bin/mypy
    step "ruff format" $bin/ruff format --check .
    step "ruff check" $bin/ruff check .
    step "imports" $bin/lint-imports --no-cache
    compile_tests
fi
# Many tests wait for other processes, so run three at a time on two processors. More would only compete
# for the processors.
several=(--numprocesses 3 --dist worksteal)
export TALLYROLL_TEST_ENVIRONMENT=$environment
run_tests() { # print failures again at the end, because much other output follows them
    # If the machine fails, all tests fail: print only the first reasons.
    $bin/pytest "${several[@]}" --maxfail 50 "${chosen[@]}" "${tests[@]}" "$@" | tee "$said" && return
    reasons+=$(grep -E '^(E  |FAILED|ERROR|_____|[^ ]+\.py:[0-9]+: )' "$said" | tail -n 60)$'\n'
    return 1
}
without_extension() { # test the Python fallback, as on a machine without a C compiler
    local its=(
        tests/collector/{batches,collectors,envs,rollout} tests/storage/{engine,replay}
        # Of the worker tests, run those of collected rows: starting, dying and sharing are pure Python.
        tests/collector/workers/test_{few_slots_of_workers,weights_in_a_lease}.py
        tests/collector/workers/test_multiprocess_{async,episodes,state,sync}.py
        # Of the fault tests, run those that hit rows while they are written: the others test files and
        # processes.
        tests/storage/faults/test_{copies,failing_calls,kill*,power_cuts,system_errors}.py
        tests/storage/faults/rewinds/test_kill*.py
        tests/storage/formats/test_memmap_storage.py tests/project/test_golden.py
    )
    TALLYROLL_PLAN=-kernel $bin/pytest "${several[@]}" -m "not slow" "${its[@]}" "$@"
}
sanitizers() { # print the libraries that a debug build preloads, or fail if one is missing
    local name path found=()
    for name in asan ubsan stdc++; do
        path=$(gcc -print-file-name="lib$name.so" 2>/dev/null) && [[ -e $path ]] || return
        found+=("$path")
    done
    echo "${found[*]}"
}
under_sanitizers() { # test a debug build of the extensions: a fault aborts or leaves a report
    local tree=$PWD/$venv/debug reports=$PWD/$venv/reports preload code=0
    local options=detect_leaks=0:handle_segv=0:allocator_may_return_null=1:abort_on_error=1
    local its=(
        tests/storage/engine/test_{compiled_copies,counts,debug_build,frame_pool}.py
        tests/storage/engine/test_{ring,storage_machine}.py
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
    # Do not capture standard error: a check that fails in C prints its message there.
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
# Tests write and sync many small files, which takes a third of their time on a disk. Use memory if there
# is room.
memory=/dev/shm
room=$(df --output=avail --block-size=1G "$memory" 2>/dev/null | tail -n 1)
if ((${room:-0} >= 6)); then
    scratch=$(mktemp -d -p "$memory" tallyroll-check.XXXXXX)
    export TMPDIR=$scratch
fi
said=$(mktemp) reasons=
all=
if [[ $environment == core && ${#chosen[@]} == 0 ]]; then all=1 chosen=(-m "not slow"); fi
if [[ ! $browser ]]; then step "pytest" run_tests "$@"; fi
if [[ $group ]]; then join; fi
if [[ $all ]]; then
    step "pytest without the extension" without_extension "$@"
    step "pytest under sanitizers" under_sanitizers "$@"
    chosen=(-m slow)
    step "long tests" run_tests "$@"
fi

if ((${#others[@]})); then # all environments install the same wheel
    built=$(mktemp -d)
    cp "$venv"/dist/* "$built"
    export TALLYROLL_CHECK_BUILT=$built
fi
if [[ ${TALLYROLL_CHECK_ONCE-} ]]; then rm -rf "$venv"; fi

export TALLYROLL_RAY=short  # its actors import torch for minutes; --apart ray runs all tests
for other in "${others[@]}"; do
    if (($(date +%s) > ${TALLYROLL_CHECK_UNTIL:-9999999999})); then
        printf '\n== environment %s\nnot run: no time is left\n' "$other"
        continue
    fi
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
