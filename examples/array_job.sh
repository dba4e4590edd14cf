#!/usr/bin/env bash
# Three algorithms with five seeds each, as an array of 15 Slurm jobs that may be killed at any time:
#
#     sbatch examples/array_job.sh                          # from the root of the repository
#     SLURM_ARRAY_TASK_ID=7 bash examples/array_job.sh      # one job, without Slurm
#     python examples/array_job.py                          # all jobs on this machine, killed at random
#
# A job that was preempted, whose node failed, or whose time limit was reached goes back into the queue.
# Its command is the same each time: it resumes from the newest checkpoint in its folder, and ends
# with exactly its budget. RUNS names the parent folder of all jobs (default: runs), and PYTHON the
# interpreter (default: python). A finished job that is started again does not train any further.
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
sac) options=(  # the defaults are for HalfCheetah, which takes minutes
    --env-id Pendulum-v1 --total-frames 5001 --random-frames 1000 --ring 4500 --updates 4
    --width 64 --minibatch 64 --gamma 0.95 --lr 3e-3 --tau 0.03 --save-every 500
) ;;
esac

# Slurm signals only this script: SIGTERM before it takes the machine away, and SIGUSR1 two minutes
# before the time limit. The job then saves a checkpoint and ends. After a preemption Slurm itself
# requeues the job.
job='' told='' again=''
tell() {
    told=1
    if [[ $job ]]; then kill -TERM "$job" || true; fi
}
trap tell TERM
trap 'again=1; tell' USR1

# The arguments of this script come last, so they override the others: for example --total-frames 1001.
"${PYTHON:-python}" "examples/$algorithm.py" --seed "$((task % seeds + 1))" --eval-episodes 10 \
    --checkpoint "${RUNS:-runs}/$algorithm" "${options[@]}" "$@" &
job=$!
if [[ $told ]]; then tell; fi  # a signal arrived before the job was started

told=1
while [[ $told ]]; do  # a signal ends `wait`, but not the job
    told='' status=0
    wait "$job" || status=$?
done
if [[ $again ]] && ((status)); then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$task"
fi
exit "$status"
