#!/usr/bin/env bash
# Everything that is to be known of a GPU in one visit, within eight minutes:
#
#   benchmarks/gpu.sh [FOLDER]             results; default: $OUT, else bench/gpu
#
#   NANOGPT=checkout         nanoGPT measured beside ours; without it: ours alone
#   TEXT=file                text to train on; default: this project's own sources
#   DEVICE=cpu PRESET=tiny   the same with a tiny model, to try the script where there is no GPU
#   PYTHON=python3
#
# Each stage has its own time and log, and one that fails stops no other. The exit code is the number
# of stages that failed; which, and how long each took, is in FOLDER/stages.txt.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} device=${DEVICE:-cuda} preset=${PRESET:-gpt2}
out=${1:-${OUT:-bench/gpu}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
data=$out/words.h5
failed=0
export TORCHINDUCTOR_CACHE_DIR=$out/.inductor

stage() { # NAME SECONDS COMMAND...: runs it, its output in NAME.log
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    [ $code -eq 0 ] || failed=$((failed + 1))
    echo "$name: exit $code after $((SECONDS - start)) s" | tee -a "$out/stages.txt"
}

facts() {
    command -v nvidia-smi >/dev/null && nvidia-smi
    "$python" - "$device" <<'PYTHON'
import json, platform, sys
import torch
from gptfast.device.machine import find_machine, measure_matmul_peak, peak_dtype

machine = find_machine(sys.argv[1])
facts = {
    "name": machine.name,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": platform.python_version(),
    "threads": torch.get_num_threads(),
    "peak_dtype": str(peak_dtype(machine.device)),
}
peak = measure_matmul_peak(machine.device, peak_dtype(machine.device), seconds=1)
facts["matmul_peak_tflops"] = peak / 1e12
if machine.kind == "cuda":
    properties = torch.cuda.get_device_properties(machine.device)
    facts["capability"] = [properties.major, properties.minor]
    facts["memory_gib"] = properties.total_memory / 2**30
    a = torch.empty(2**30, dtype=torch.uint8, device=machine.device)
    b = torch.empty_like(a)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    facts["copy_gb_per_s"] = 2 * a.nbytes / min(times) / 1e6
print(json.dumps(facts, indent=1))
PYTHON
}

# Compile comes last: each rung is a process of its own, and compiles anew whatever is below it.
cat >"$out/gptfast.toml" <<'TOML'
[profiles.ladder]
extends = "baseline"
[profiles.ladder.model]
preset = "gpt2"
[profiles.ladder.train]
batch_size = 16
learning_rate = 6e-4
min_lr = 6e-5
[profiles.ladder.plugins]
tf32 = true
amp = true
flash = true
vocab-pad = true
fused-adamw = true
compile = true
TOML

if [ "$preset" = gpt2 ]; then
    rounds=5 laps=10 smaller=() changes=()
    profiles=(gpt2-124m~all gpt2-124m gpt2-124m+chunked-loss gpt2-124m+fp8 gpt2-124m-8gb)
else # without what a few cores would compile for minutes
    rounds=2 laps=2 changes=(--without compile)
    smaller=(model.n_layer=1 model.n_head=2 model.n_embd=32 model.block_size=32 train.batch_size=2)
    profiles=(gpt2-124m~all gpt2-124m~compile gpt2-124m-8gb~compile)
fi
settings=(--set "data.path=$data" ${changes[@]+"${changes[@]}"})
for setting in ${smaller[@]+"${smaller[@]}"}; do settings+=(--set "$setting"); done

: >"$out/stages.txt"
# Plugins are found where the project is installed; this needs no network.
"$python" -c 'import gptfast_plugins' 2>/dev/null ||
    stage install 20 "$python" -m pip install --no-deps --no-build-isolation --quiet -e .

export -f facts
export python device
stage facts 30 bash -c facts
if [ -n "${TEXT:-}" ]; then
    stage prepare 30 "$python" -m gptfast prepare "$TEXT" --out "$data" --force
else
    stage prepare 30 "$python" -m gptfast prepare gptfast plugins tests --glob '*.py' \
        --out "$data" --force
fi
stage steps 150 "$python" benchmarks/nanogpt_steps.py --preset "$preset" --device "$device" \
    --data "$data" ${NANOGPT:+--nanogpt "$NANOGPT"} --rounds $rounds --steps $laps \
    --profiles "${profiles[@]}" --out "$out/steps.json"
stage ladder 160 "$python" -m gptfast bench --config "$out/gptfast.toml" --profile ladder \
    --device "$device" "${settings[@]}" --rounds 6 --steps $(((laps + 1) / 3)) \
    --out "$out/ladder"
if [ "$device" = cuda ]; then
    stage tests 90 "$python" -m pytest -q -m gpu tests
fi

cat "$out/steps.log"
exit $failed
