#!/usr/bin/env bash
# Three algorithms with five seeds each, as an array of 15 Slurm jobs that may be killed at any time:
#
#     sbatch examples/array_job.sh                          # from the root of the repository
#     SLURM_ARRAY_TASK_ID=7 bash examples/array_job.sh      # one of them, without Slurm
#     python examples/array_job.py                          # all of them, killed at random, here
#
# A job that was preempted, whose node failed, or whose time is up is put back into the queue, and its
# command is the same each time: it goes on from the newest checkpoint of its folder, and ends with
# exactly its budget. RUNS names the folder of all of them (default: runs), and PYTHON the interpreter
# (default: python); a finished job that is started again trains no more.
#SBATCH --job-name=array
#SBATCH --array=0-14
#SBATCH --time=01:00:00
#SBATCH --cpus-per-task=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%a.txt
#SBATCH --signal=B:USR1@120
set -euo pipefail

algorithms=(ppo dqn sac) seeds=5
task=${SLURM_ARRAY_TASK_ID-} last=$((${#algorithms[@]} * seeds - 1))
if [[ ! $task =~ ^(0|[1-9][0-9]?)$ ]] || ((task > last)); then
    echo "SLURM_ARRAY_TASK_ID: expected the number of a job, 0 to $last, got '$task'" >&2
    exit 2
fi
algorithm=${algorithms[task / seeds]}

case $algorithm in
ppo) options=(--total-frames 20001 --frames-per-batch 1024 --minibatch 128) ;;
dqn) options=(
    --total-frames 20001 --num-envs 16 --frames-per-batch 16 --random-frames 1000 --ring 15000
    --updates 2 --save-every 1000
) ;;
sac) options=(  # its defaults are HalfCheetah's, which takes minutes
    --env-id Pendulum-v1 --total-frames 5001 --random-frames 1000 --ring 4500 --updates 4
    --width 64 --minibatch 64 --gamma 0.95 --lr 3e-3 --tau 0.03 --save-every 500
) ;;
esac

# Slurm signals this script alone, by SIGTERM before it takes the machine away, and by SIGUSR1 two
# minutes before the limit: the job saves and ends. After a preemption Slurm queues it again itself.
job='' told='' again=''
tell() {
    told=1
    if [[ $job ]]; then kill -TERM "$job" || true; fi
}
trap tell TERM
trap 'again=1; tell' USR1

# What is given to this script comes last, and wins: --total-frames 1001, say.
"${PYTHON:-python}" "examples/$algorithm.py" --seed "$((task % seeds + 1))" --eval-episodes 10 \
    --checkpoint "${RUNS:-runs}/$algorithm" "${options[@]}" "$@" &
job=$!
if [[ $told ]]; then tell; fi  # it came before there was a job

told=1
while [[ $told ]]; do  # a signal ends `wait`, and not the job
    told='' status=0
    wait "$job" || status=$?
done
if [[ $again ]] && ((status)); then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$task"
fi
exit "$status"
