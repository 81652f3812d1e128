#!/usr/bin/env bash
# What several GPUs of one host decide, in one command of under ten minutes.
#
#   benchmarks/several_gpus.sh N OUT [SECONDS]
#
# N GPUs of those that are visible; OUT gets a log and a JSON file of each part, `summary.txt` the
# exit statuses. Parts come in the order of what they are worth; what SECONDS (570) leave is given
# to the next one. NVLink multicast stays off.
set -uo pipefail
n=$1 out=$2 end=$((SECONDS + ${3:-570}))
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 OMP_NUM_THREADS=1
on() { python3 -m torch.distributed.run --standalone --nproc-per-node "$1" "${@:2}"; }

part() {  # NAME LIMIT COMMAND...
  local name=$1 left=$((end - SECONDS)) begun=$SECONDS
  local limit=$(($2 < left ? $2 : left))
  ((limit > 5)) || { echo "$name: no time left" | tee -a "$out/summary.txt"; return; }
  timeout --kill-after=10 "$limit" bash -c "$(declare -f on); ${*:3}" 2>&1 | tee -a "$out/$name.log"
  echo "$name: exit ${PIPESTATUS[0]} after $((SECONDS - begun)) s" | tee -a "$out/summary.txt"
}

tests="python3 -m pytest -q -s -rf -p no:cacheprovider -p no:xdist --ranks $n"
part bench 120 on "$n" benchmarks/bench_comm.py --operation all-reduce exchange context \
  --hidden 8192 4096 --json "$out/comm.json"
part bench 60 on "$n" benchmarks/bench_comm.py --operation experts --hidden 7168 \
  --json "$out/experts.json"
part tests 240 "$tests" --full tests/comm --ignore=tests/comm/test_parallel_attention.py
part step 150 on 1 -m examples.serve.parallel_step --json "$out/step1.json"
part step 120 on "$n" -m examples.serve.parallel_step --json "$out/step$n.json" \
  --like "$out/step1.json"
part tests 150 "$tests" tests/serve/test_tensor_parallel.py tests/comm/test_parallel_attention.py
((n < 8)) || part tests 200 "${tests% *} 3,5,6,7" tests/comm \
  --ignore=tests/comm/test_parallel_attention.py
cat "$out/summary.txt"
! grep -qv "exit 0 " "$out/summary.txt"
