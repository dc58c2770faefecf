#!/usr/bin/env bash
# Train on the GPUs of this machine, or on the CPU if it has none.
#   NGPU=8 CONFIG_FILE=train_configs/quadrivium-1536x48-h200x8.toml tools/launch.sh [--section.key value ...]
# Words before -- go to torchrun, such as those for several nodes:
#   tools/launch.sh --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -- --training.steps 100
# The same command continues from the newest checkpoint. PYTHON names another interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

config=${CONFIG_FILE:-$root/train_configs/debug.toml}
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
gpus=${NGPU:-$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)}
[ "$gpus" -gt 0 ] || gpus=1

launcher=() training=("$@")
for ((i = 1; i <= $#; i++)); do
    if [ "${!i}" = -- ]; then
        launcher=("${@:1:i-1}") training=("${@:i+1}")
        break
    fi
done
case " ${launcher[*]} " in
*" --nnodes"* | *" --rdzv"* | *" --master"*) ;;
*) launcher+=(--standalone) ;;
esac

exec "$python" -m torch.distributed.run --nproc-per-node="$gpus" "${launcher[@]}" \
    -m nvium_titan.train --config-file "$config" "${training[@]}"
