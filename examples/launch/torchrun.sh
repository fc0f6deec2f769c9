#!/usr/bin/env bash
# One training job on several machines. Run it on every machine, with the same HEAD, NODES and arguments; the order does
# not matter. The run file, the data and run.dir must be on a file system that all of them see.
#
#   HEAD=node0 NODES=4 bash examples/launch/torchrun.sh run.toml --set layout.ep=8
#
#   HEAD       name or address of one of the machines, at which all meet
#   NODES      how many machines; "2:4" for a job that may go on with fewer (layout.dp = "auto")
#   PROCESSES  per machine: a number, or gpu (one per GPU, the default)
#   PORT       a free port on HEAD (29400)
#   JOB        a name that no other job on HEAD uses at the same time (moesaic)
#   RESTARTS   how often to start anew after a failure, from the last checkpoint (3)
#   GRACE      seconds to finish a step and save when the job is told to stop (120)
#   TORCHRUN   another torchrun than the one on the PATH; `echo` shows the command
set -euo pipefail

: "${HEAD:?set HEAD to the machine at which all meet}"
: "${NODES:?set NODES to the number of machines}"
[ $# -gt 0 ] || { echo "usage: HEAD=… NODES=… bash $0 RUN_FILE [--set table.key=value]…" >&2; exit 2; }

# Machines that come in later find the others only with this.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# --resume goes on from the newest checkpoint in run.dir, and starts from nothing where there is none.
exec ${TORCHRUN:-torchrun} \
  --nnodes "$NODES" --nproc-per-node "${PROCESSES:-gpu}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${JOB:-moesaic}" \
  --max-restarts "${RESTARTS:-3}" --shutdown-timeout "${GRACE:-120}" \
  -m moesaic train "$@" --resume
