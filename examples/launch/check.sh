#!/usr/bin/env bash
# Checks the launch scripts without a cluster: they parse, Slurm's part runs with stand-ins for its commands, and
# torchrun.sh really starts two "machines" of two processes each on this one, which train two steps of a tiny model.
# Needs `pip install 'moesaic[train]'` and two cores; takes about a minute.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

for script in "$here"/*.sh "$here"/*.sbatch; do bash -n "$script"; done
echo "The scripts parse."

python3=${PYTHON:-python3}
"$python3" - "$here/pytorchjob.yaml" <<'PY'
import sys
import yaml
job = yaml.safe_load(open(sys.argv[1], encoding="utf-8"))
worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
(container,) = worker["template"]["spec"]["containers"]
assert (job["apiVersion"], job["kind"], container["name"]) == ("kubeflow.org/v1", "PyTorchJob", "pytorch")
PY
echo "pytorchjob.yaml is YAML, and a PyTorchJob."

# Slurm's commands, as far as the script uses them. What srun would start on two machines is shown, not run.
mkdir bin
printf '#!/bin/sh\necho node7\necho node8\n' >bin/scontrol
printf '#!/bin/sh\necho "srun $1"\nshift\nexec "$@"\n' >bin/srun
chmod +x bin/*
SLURM_SUBMIT_DIR=$(dirname "$(dirname "$here")") SLURM_JOB_NODELIST='node[7-8]' SLURM_JOB_NUM_NODES=2 SLURM_JOB_ID=123 \
  SLURM_CPUS_PER_TASK=96 SLURM_GPUS_ON_NODE=8 TORCHRUN=echo PATH="$work/bin:$PATH" \
  bash "$here/slurm.sbatch" run.toml --set layout.ep=8 | tee slurm.txt
grep -q -- '--nnodes 2 --nproc-per-node gpu .* --rdzv-endpoint node7:29523 --rdzv-id 123 ' slurm.txt
grep -q -- '-m moesaic train run.toml --set layout.ep=8 --resume$' slurm.txt
echo "slurm.sbatch starts what it should."

for i in $(seq 40); do echo "the router sends token $i to two experts of four, and the sum of both goes on."; done >text.txt
cat >run.toml <<'TOML'
[model]
model_type = "mixtral"
vocab_size = 257
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
num_local_experts = 4
num_experts_per_tok = 2
[data]
path = "text.txt"
validation_fraction = 0.0
[layout]
ep = 4
[train]
steps = 2
seq_len = 16
global_batch = 8
[run]
dir = "run"
TOML
port=$("$python3" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export HEAD=127.0.0.1 NODES=2 PROCESSES=2 PORT=$port JOB=check RESTARTS=0 OMP_NUM_THREADS=1 MOESAIC_CACHE="$work/cache"
export GLOO_SOCKET_IFNAME=lo TORCHRUN="${TORCHRUN:-$python3 -m torch.distributed.run}"
bash "$here/torchrun.sh" run.toml >first.txt 2>&1 &
first=$!
if ! bash "$here/torchrun.sh" run.toml >second.txt 2>&1 || ! wait "$first"; then
  cat first.txt second.txt
  exit 1
fi
[ "$(wc -l <run/metrics.jsonl)" = 2 ]
[ -d run/checkpoints/step-2 ]
echo "torchrun.sh trains on two machines of two processes."
